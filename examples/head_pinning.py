"""Head pinning in small (P0.16): fine-tuning without a loss, with Eq. 7 and with Eq. 8.

A model of 3 layers learns a synthetic language in which an attention sink forms within minutes: a
Markov chain of 64 letters, four of which are followed by what stood before them. A head that copies
has nothing to do elsewhere, and rests on the first token. LoRA then adapts the model to another
chain three times. Run it from the repository; 12 minutes of CPU.

    python examples/head_pinning.py runs/head-pinning
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megasink.analysis.folder import read_analysis
from megasink.analysis.pages.heatmap import importance_pictures
from megasink.balance.shared_heads import choose_shared_heads
from megasink.checkpoints.find import newest_checkpoint
from megasink.cli.trigger_language import TriggerLanguage, texts_of
from megasink.finetune.steps import Step

# Of a document, which a BOS and an EOD enclose.
LENGTH = 62
TEXTS = {"pretrain": (0, 120_000), "finetune": (1, 40_000)}
PRETRAIN, FINETUNE = 1000, 400
MODEL = """
    --cpu --ranks 1 --num-layers 3 --hidden-size 128 --num-attention-heads 8
    --seq-length 504 --max-position-embeddings 512 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-variant vanilla --dataloader-inter-document-masking --split 98,2,0
    --lr-decay-style cosine --lr-warmup-fraction 0.05 --log-interval 50
"""
BASE = f"""
    --micro-batch-size 8 --global-batch-size 8 --lr 2e-3 --min-lr 2e-4 --head-balance-coeff 0
    --train-iters {PRETRAIN} --save-interval 500 --eval-interval 250 --eval-iters 2
"""
ADAPTED = f"""
    --micro-batch-size 4 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lora-rank 16
    --train-iters {FINETUNE} --save-interval {FINETUNE} --eval-interval 100 --eval-iters 4
"""


def write_texts(folder: Path) -> None:
    """Write the tokenizer, one token per byte, and both corpora."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder / "tokenizer")
    for name, (chain, documents) in TEXTS.items():
        ids_DL = TriggerLanguage(chain=chain).sample(documents, LENGTH, chain + 10)
        lines = [json.dumps({"text": text}) for text in texts_of(ids_DL)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / f"{name}-sample.jsonl").write_text("\n".join(lines[:64]) + "\n")


def steps(out: Path) -> Iterator[Step]:
    """Yield the commands; each is skipped where it is done."""
    for name in TEXTS:
        data = ["data", out / f"{name}.jsonl", "--tokenizer", out / "tokenizer", "--overwrite"]
        done = (out / f"{name}-data.json").is_file
        yield Step(f"{name}: tokens", [*data, "--output", out / f"{name}-data"], done)
    yield _training(out, "base", "pretrain", BASE, PRETRAIN)
    yield _analysis(out, "base")
    shared = choose_shared_heads(_importance(out, "base")).m
    before = f" --pretrained-checkpoint {out / 'base' / 'checkpoints'}"
    for name, coeff, m in (("no-loss", 0.0, 0), ("eq-7", 1e-2, 0), ("eq-8", 1e-2, shared)):
        loss = f" --head-balance-coeff {coeff} --head-balance-shared-heads {m}"
        yield _training(out, name, "finetune", ADAPTED + before + loss, FINETUNE)
        yield _analysis(out, name)


def _training(out: Path, name: str, text: str, flags: str, iterations: int) -> Step:
    words = ["train", *MODEL.split(), *flags.split(), "--run-dir", out / name, "--resume", "auto"]
    words += ["--data-path", out / f"{text}-data", "--tokenizer-model", out / "tokenizer"]
    checkpoints = out / name / "checkpoints"
    return Step(f"{name}: training", words, lambda: newest_checkpoint(checkpoints) == iterations)


def _analysis(out: Path, name: str) -> Step:
    output = out / f"{name}-heads"
    words = ["analyze", out / name, "--data", out / "finetune-sample.jsonl", "--output", output]
    words += ["--seq-length", "64", "--no-loss"]
    return Step(f"{name}: heads", words, (output / "results.json").is_file)


def _importance(out: Path, name: str) -> np.ndarray:
    return read_analysis(out / f"{name}-heads").values("importance")


def _validation(out: Path, name: str) -> float:
    lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    return [line["valid_lm_loss"] for line in lines if line.get("valid_lm_loss") is not None][-1]


def main(folder: str) -> None:
    """Run what is not done yet; write head_pinning.png and head_pinning.json."""
    out, console = Path(folder), Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "finetune-sample.jsonl").is_file():
        write_texts(out)
    for step in steps(out):
        step.run(console)
    titles = {"base": "before", "no-loss": "no loss", "eq-7": "Eq. 7", "eq-8": "Eq. 8"}
    maps = [(title, _importance(out, name)) for name, title in titles.items()]
    (out / "head_pinning.png").write_bytes(importance_pictures(maps))
    facts = {
        title: {
            "importance": importance.round(4).tolist(),
            "imbalance_by_layer": (importance.std(1) / importance.mean(1)).round(4).tolist(),
            "validation_loss": None if name == "base" else round(_validation(out, name), 4),
        }
        for (name, title), (_, importance) in zip(titles.items(), maps, strict=True)
    }
    facts["shared heads"] = choose_shared_heads(_importance(out, "base")).m
    (out / "head_pinning.json").write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"wrote {out}/head_pinning.png and .json")


if __name__ == "__main__":
    main(*sys.argv[1:])
