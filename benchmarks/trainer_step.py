"""The whole trainer's step over that of a bare PyTorch loop of the same model and weights.

One process, one rank, one thread of the CPU, fp32. Before each step of the trainer the loop takes
one, so that both see the same machine. A trainer's step lasts from its beginning to that of the
next: data, schedule, gradient reduction, optimizer, statistics and log lines belong to it. The loop
is what one would write by hand: torch's attention, norms, linear layers, AdamW and clipping.

The loop has no head-balance loss and no statistics: what they cost counts against the trainer. With
`gated` it has the same headwise gates, as rows of its projection of Q, K and V. With `sink` it has
vanilla attention: torch has no fused attention with sinks, and one written out would be slower. So
what sinks cost counts against the trainer, too.

    python benchmarks/trainer_step.py --blocks 10

A ratio is that of the CPU time of a block of ten steps, one of them with a log line.

Shapes: S sequence, B batch, H heads, D head dimension, d hidden size, F FFN size, V vocabulary.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megasink import cpu

LAYERS, WIDTH, HEADS, FFN, VOCABULARY = 6, 512, 8, 1376, 4096
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0
BLOCK, WARM = 10, 1  # steps of a block, and blocks that do not count
OFF, ON = "--head-balance-coeff 0", "--head-balance-coeff 1e-4"
# What the trainer runs.
CONFIGURATIONS: dict[str, list[str]] = {
    name: f"--attention-variant {flags}".split()
    for name, flags in {
        "vanilla, no loss": f"vanilla {OFF}",
        "vanilla + balance loss": f"vanilla {ON}",
        "sink, no loss": f"sink {OFF}",
        "sink + balance loss": f"sink {ON}",
        "gated, no loss": f"gated {OFF}",
        "gated + balance loss": f"gated {ON}",
    }.items()
}


class Block(nn.Module):
    """A layer of a Llama, with Q, K and V in one projection, by head: [H x (q, k, v) x D, d].

    Args:
        gates: a sigmoid gate per head behind attention, the last H rows of the projection.
    """

    def __init__(self, gates: bool) -> None:
        super().__init__()
        self.gates = gates
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH + gates * HEADS, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x_BSd: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        B, S, _ = x_BSd.shape
        mixed = self.qkv(self.attention_norm(x_BSd))
        if self.gates:
            mixed, score_BSH = mixed.split((3 * WIDTH, HEADS), -1)
        query, key, value = mixed.view(B, S, HEADS, 3, -1).transpose(1, 2).unbind(3)
        query, key = (x * cos_SD + _half_turned(x) * sin_SD for x in (query, key))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out_BSHD = out.transpose(1, 2)
        if self.gates:
            out_BSHD = out_BSHD * score_BSH.sigmoid()[..., None]
        x_BSd = x_BSd + self.out(out_BSHD.reshape(B, S, WIDTH))
        gate, up = self.up(self.ffn_norm(x_BSd)).chunk(2, -1)
        return x_BSd + self.down(functional.silu(gate) * up)


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Bare(nn.Module):
    """The model by hand; for `gates` see `Block`."""

    def __init__(self, sequence: int, gates: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(gates) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)
        angles = torch.outer(torch.arange(sequence), 10000.0**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        x_BSd = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSd = block(x_BSd, self.cos, self.sin)
        logits = self.head(self.norm(x_BSd))
        return functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten())

    @torch.no_grad()
    def take(self, model: nn.Module) -> None:
        """Copy the weights of Megatron's model."""
        from megatron.core.utils import unwrap_model

        from megasink.megatron.initial_weights import global_names

        whole: Any = unwrap_model(model)
        names_in_blocks = global_names(whole)
        given = {names_in_blocks[name]: p for name, p in whole.named_parameters()}
        self.embedding.weight.copy_(given["embedding.word_embeddings.weight"][:VOCABULARY])
        self.head.weight.copy_(given["output_layer.weight"][:VOCABULARY])
        self.norm.weight.copy_(given["decoder.final_norm.weight"])
        names = {
            "attention_norm": "input_layernorm",
            "qkv": "self_attention.linear_qkv",
            "out": "self_attention.linear_proj",
            "ffn_norm": "pre_mlp_layernorm",
            "up": "mlp.linear_fc1",
            "down": "mlp.linear_fc2",
        }
        for number, block in enumerate(self.blocks):
            for ours, theirs in names.items():
                weight = given[f"decoder.layers.{number}.{theirs}.weight"]
                mine = block.get_submodule(ours).weight
                mine.copy_(weight[: len(mine)])  # without padding behind rows of gates


def loop(bare: Bare, sequence: int, microbatches: int) -> Callable[[], None]:
    """Return a function that trains one step."""
    decayed = [p for p in bare.parameters() if p.dim() > 1]
    others = [p for p in bare.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def step() -> None:
        for _ in range(microbatches):
            tokens = torch.randint(VOCABULARY, (1, sequence + 1))
            (bare(tokens[:, :-1], tokens[:, 1:]) / microbatches).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Race:
    """Takes the place of Megatron's `train_step`: the loop steps before each step of the trainer.

    Attributes:
        trainer, bare: CPU seconds of each step.
    """

    def __init__(
        self, inner: Callable[..., Any], sequence: int, microbatches: int, configuration: str
    ):
        self.inner, self.sequence, self.microbatches = inner, sequence, microbatches
        self.configuration = configuration
        self.trainer: list[float] = []
        self.bare: list[float] = []
        self._step: Callable[[], None] | None = None
        self._began = 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._step is None:
            model = Bare(self.sequence, gates=self.configuration.startswith("gated"))
            model.take(args[2][0])
            self._step = loop(model, self.sequence, self.microbatches)
            if not self.configuration.startswith("sink"):
                check(model, args[2][0], self.sequence)
        else:
            self.trainer.append(time.process_time() - self._began)
        began = time.process_time()
        self._step()
        self.bare.append(time.process_time() - began)
        self._began = time.process_time()
        return self.inner(*args, **options)


@torch.no_grad()
def check(bare: Bare, model: nn.Module, sequence: int) -> None:
    """Fail if the two models differ."""
    tokens = torch.randint(VOCABULARY, (1, sequence + 1))
    positions = torch.arange(sequence)[None]
    theirs = model.eval()(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    model.train()
    torch.testing.assert_close(bare(tokens[:, :-1], tokens[:, 1:]), theirs, rtol=1e-5, atol=0)


def race(arguments: argparse.Namespace) -> Race:
    """Train in this process, with the loop beside it."""
    from megatron.training import training

    from megasink.training.pretrain import pretrain

    name, flags = arguments.configuration, CONFIGURATIONS[arguments.configuration]
    found = Race(training.train_step, arguments.sequence, arguments.microbatches, name)
    steps = BLOCK * (WARM + arguments.blocks) + 1  # the end of the last one is the next beginning
    words = f"""
        --device cpu --num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads {HEADS}
        --ffn-hidden-size {FFN} --seq-length {arguments.sequence}
        --max-position-embeddings {arguments.sequence} --micro-batch-size 1
        --global-batch-size {arguments.microbatches} --train-iters {steps} --lr {LEARNING_RATE}
        --lr-decay-style constant --adam-beta2 {BETAS[1]} --weight-decay {WEIGHT_DECAY}
        --clip-grad {CLIP} --normalization RMSNorm --swiglu --disable-bias-linear
        --position-embedding-type rope --untie-embeddings-and-output-weights --mock-data
        --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --num-workers 0 --eval-iters 0
        --make-vocab-size-divisible-by 1 --log-interval {BLOCK}
    """.split()
    training.train_step = found
    with tempfile.TemporaryDirectory() as folder:
        pretrain([*words, *flags, "--run-dir", f"{folder}/run", "--save-interval", "1000000"])
    training.train_step = found.inner
    return found


def main() -> None:
    """Print the row of a configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--configuration", choices=CONFIGURATIONS, default=next(iter(CONFIGURATIONS))
    )
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=2)
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    torch.set_num_threads(1)
    cpu.activate()
    found = race(arguments)
    blocks = range(BLOCK * WARM, len(found.trainer), BLOCK)
    of_bare = [sum(found.bare[at : at + BLOCK]) for at in blocks]
    ratios = [
        sum(found.trainer[at : at + BLOCK]) / bare for at, bare in zip(blocks, of_bare, strict=True)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{arguments.configuration}: {LAYERS} layers, d {WIDTH}, S {arguments.sequence}, "
        f"{arguments.microbatches} microbatches of 1, fp32, one thread, torch {torch.__version__}: "
        f"loop {1e3 * statistics.median(of_bare) / BLOCK:.0f} ms of CPU a step, trainer over it "
        f"{middle:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} blocks of {BLOCK})"
    )


if __name__ == "__main__":
    main()
