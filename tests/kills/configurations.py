"""The runs that are killed: one tiny model in layouts that save in different ways."""

import shlex
from dataclasses import dataclass

STEPS, SAVE_INTERVAL = 120, 10
MODEL = shlex.split(f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4
    --train-iters {STEPS} --save-interval {SAVE_INTERVAL} --lr 1e-3 --normalization RMSNorm
    --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 127
    --mock-data --eval-iters 1 --eval-interval 50 --log-interval 1 --head-balance-coeff 0.1
    --num-workers 1 --distributed-timeout-minutes 1
""")


@dataclass(frozen=True)
class Configuration:
    """A run: its name in the table, its ranks, its flags beside those of the model."""

    name: str
    ranks: int
    flags: tuple[str, ...]

    @property
    def saves_in_background(self) -> bool:
        return "--async-save" in self.flags


DISTRIBUTED = "--use-distributed-optimizer"
CONFIGURATIONS = (
    Configuration("1 rank", 1, ()),
    Configuration("TP 2", 2, ("--tensor-model-parallel-size", "2")),
    Configuration("DP 2, distributed optimizer", 2, (DISTRIBUTED,)),
    Configuration("DP 2, distributed optimizer, async", 2, (DISTRIBUTED, "--async-save")),
    Configuration("PP 2, async", 2, ("--pipeline-model-parallel-size", "2", "--async-save")),
)
