"""The runs that are killed: one tiny model in layouts that save in different ways."""

from dataclasses import dataclass

from tests.runs import MOCK, TINY, UNTIED

STEPS, SAVE_INTERVAL = 120, 10
MODEL = [*TINY, *UNTIED, *MOCK]
MODEL += f"""
    --hidden-size 32 --train-iters {STEPS} --save-interval {SAVE_INTERVAL} --vocab-size 128
    --eval-interval 50 --head-balance-coeff 0.1 --num-workers 1 --distributed-timeout-minutes 1
""".split()


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
