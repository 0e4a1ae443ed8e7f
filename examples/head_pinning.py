"""Head pinning in small (P0.16): fine-tuning without a loss, with Eq. 7 and with Eq. 8.

A model of 3 layers learns a synthetic language in which an attention sink forms within minutes: a
Markov chain of 64 letters, four of which are followed by what stood before them. A head that copies
has nothing to do elsewhere, and rests on the first token. LoRA then adapts the model to another
chain three times, in transformers. Run it from the repository, with the extras train and finetune.

    python examples/head_pinning.py runs/head-pinning
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.steps import Step
from megasink.analysis.folder import read_analysis
from megasink.analysis.pages.heatmap import importance_pictures
from megasink.balance.shared_heads import choose_shared_heads
from megasink.checkpoints.find import newest_checkpoint
from megasink.cli.trigger_language import TriggerLanguage, texts_of

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
BATCH, RANK, HELD_OUT = 32, 16, 500  # documents, of LoRA, documents


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
    data = ["data", out / "pretrain.jsonl", "--tokenizer", out / "tokenizer", "--overwrite"]
    data += ["--output", out / "data"]
    yield Step("tokens", data, (out / "data.json").is_file)
    run = out / "run"
    words = ["train", *MODEL.split(), *BASE.split(), "--run-dir", run, "--resume", "auto"]
    words += ["--data-path", out / "data", "--tokenizer-model", out / "tokenizer"]
    done = lambda: newest_checkpoint(run / "checkpoints") == PRETRAIN  # noqa: E731
    yield Step("base: training", words, done)
    export = ["convert-to-hf", run, out / "base"]
    yield Step("base: export", export, (out / "base" / "README.md").is_file, makes=out / "base")
    yield analysis(out, "base")


def adapt(out: Path, name: str, coeff: float, shared: int) -> None:
    """Adapt the base with LoRA to the second chain; OUT/NAME is the merged model."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from megasink.transformers import NAME, HeadBalanceCallback

    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    texts = [json.loads(line)["text"] for line in (out / "finetune.jsonl").open()]
    ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(texts)["input_ids"]]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    set_seed(1234)
    model = AutoModelForCausalLM.from_pretrained(out / "base", attn_implementation=NAME)
    targets = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, **targets))
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(out / f"{name}-training"),
            max_steps=FINETUNE,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            learning_rate=1e-3,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=FINETUNE // 20,
            logging_steps=FINETUNE // 8,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=rows.select(range(len(rows) - HELD_OUT)),
        eval_dataset=rows.select(range(len(rows) - HELD_OUT, len(rows))),
    )
    HeadBalanceCallback(coeff, shared).add_to(trainer)
    trainer.train()
    (out / f"{name}.json").write_text(json.dumps(trainer.evaluate()))
    tokenizer.save_pretrained(out / name)
    model.merge_and_unload().save_pretrained(out / name)


def analysis(out: Path, name: str) -> Step:
    """Return the analysis of a model."""
    output = out / f"{name}-heads"
    words = ["analyze", out / name, "--data", out / "finetune-sample.jsonl", "--output", output]
    words += ["--seq-length", "64", "--no-loss"]
    return Step(f"{name}: heads", words, (output / "results.json").is_file)


def _importance(out: Path, name: str) -> np.ndarray:
    return read_analysis(out / f"{name}-heads").values("importance")


def _validation(out: Path, name: str) -> float:
    loss: float = json.loads((out / f"{name}.json").read_text())["eval_loss"]
    return loss


def main(folder: str) -> None:
    """Run what is not done yet; write head_pinning.png and head_pinning.json."""
    out, console = Path(folder), Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "finetune-sample.jsonl").is_file():
        write_texts(out)
    for step in steps(out):
        step.run(console)
    shared = choose_shared_heads(_importance(out, "base")).m
    for name, coeff, m in (("no-loss", 0.0, 0), ("eq-7", 1e-2, 0), ("eq-8", 1e-2, shared)):
        if not (out / name / "model.safetensors").is_file():
            adapt(out, name, coeff, m)
        analysis(out, name).run(console)
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
    facts["shared heads"] = shared
    (out / "head_pinning.json").write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"wrote {out}/head_pinning.png and .json")


if __name__ == "__main__":
    main(*sys.argv[1:])
