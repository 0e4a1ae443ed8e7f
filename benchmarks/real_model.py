"""What megasink costs on a model that people use: attention against sdpa, fine-tuning against TRL.

    python benchmarks/real_model.py runs/real-models/smollm2
    python benchmarks/real_model.py runs/real-models/smollm2 --chats runs/real-models/chats.jsonl

A training step of all weights with attention "megasink" and with "sdpa" takes turns on one model.
With --chats, steps of `megasink finetune` (LoRA, the loss of Eq. 8) take turns with those of TRL's
SFTTrainer with peft and sdpa, on the same packed samples in the same order. A ratio is the median
over turns of the CPU seconds of one turn.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback, set_seed

import megasink.transformers  # noqa: F401
from megasink.finetune import sft_training as finetune
from megasink.finetune.chats import ChatTokenizer
from megasink.finetune.options import FinetuneOptions

STEPS = 5
"""Of a turn of fine-tuning; the first warms up."""


def show(what: str, ours: list[float], theirs: list[float]) -> None:
    """Print a line: seconds of both, and the ratio with its quartiles."""
    low, middle, high = statistics.quantiles(
        [a / b for a, b in zip(ours, theirs, strict=True)], n=4
    )
    print(
        f"{what}: {statistics.median(theirs):.2f} CPU s, megasink {middle:.3f} of it "
        f"({low:.3f} to {high:.3f}, {len(ours)} turns)",
        flush=True,
    )


def attention(folder: Path, tokens: int, turns: int) -> None:
    """Compare a step of all weights, float32, one row."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(model.config.vocab_size, (1, tokens))
    times: dict[str, list[float]] = {"megasink": [], "sdpa": []}
    for turn in range(turns + 1):
        for name in sorted(times, reverse=bool(turn % 2)):
            model.set_attn_implementation(name)
            start = time.process_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn:  # the first turn warms up
                times[name].append(time.process_time() - start)
    show(f"attention, S {tokens}, step with sdpa", times["megasink"], times["sdpa"])


class Clock(TrainerCallback):
    """CPU seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_args: Any, **_options: Any) -> None:
        self._start = time.process_time()

    def on_step_end(self, *_args: Any, **_options: Any) -> None:
        self.seconds.append(time.process_time() - self._start)


def fine_tuning(folder: Path, chats: Path, tokens: int, turns: int, work: Path) -> None:
    """Compare steps of one packed sample, bfloat16, rank 16 on all linear layers."""
    from peft import LoraConfig
    from trl import SFTTrainer

    options = FinetuneOptions(
        model=folder, data=(chats,), seq_length=tokens, global_batch_size=1, bf16=True
    )
    reader = ChatTokenizer(folder)
    tokenizer = reader.tokenizer
    data, _, _ = finetune.tokenized(options, reader, work / f"s{tokens}")

    def config(name: str) -> Any:
        made = finetune.arguments(options, work / f"{name}{tokens}")
        made.max_steps, made.eval_strategy, made.save_strategy = STEPS, "no", "no"
        return made

    ours = finetune.make_trainer(options, config("megasink"), tokenizer, data, 1)
    set_seed(options.seed)
    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ),
        args=config("trl"),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=lora,
    )
    theirs.remove_callback(PrinterCallback)
    times: dict[Any, list[float]] = {ours: [], theirs: []}
    for turn in range(turns + 1):
        for trainer in reversed(times) if turn % 2 else times:
            clock = Clock()
            trainer.add_callback(clock)
            trainer.train()
            trainer.remove_callback(clock)
            if turn:
                times[trainer].append(statistics.median(clock.seconds[1:]))
    show(f"fine-tuning, S {tokens}, step of TRL with peft and sdpa", times[ours], times[theirs])


def main() -> None:
    """Print a line per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    parser.add_argument("--chats", type=Path, help="conversations (.jsonl): fine-tuning instead")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as work:
        for tokens in args.lengths or ((512, 1024) if args.chats else (1024, 2048)):
            if args.chats:
                fine_tuning(args.folder, args.chats, tokens, args.turns, Path(work))
            else:
                attention(args.folder, tokens, args.turns)


if __name__ == "__main__":
    main()
