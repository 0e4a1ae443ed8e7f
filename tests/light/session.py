"""What the light weight gives, one thing after another, in a process of an environment without
Megatron: ``python session.py FOLDER`` prints JSON, {what: result}. Imports no other test file."""

import contextlib
import gzip
import importlib.util
import io
import json
import sys
from pathlib import Path

TEXTS = (
    "the cat sat on the mat and the dog sat on the cat while the mat lay there",
    "a dog saw a cat and the cat saw a mouse and the mouse saw a dog on the mat",
)


def command(*words: object) -> list[object]:
    """[exit code, last line of stderr] of a command of megasink."""
    from megasink.cli import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main([str(word) for word in words])
    return [code, (said.getvalue().strip().splitlines() or [""])[-1]]


def make_model(folder: Path) -> None:
    """A Llama with random weights, and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(("<s>", "<unk>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_run(folder: Path) -> None:
    """As much of a run as the file system shows."""
    (folder / "checkpoints" / "iter_0000001").mkdir(parents=True)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    (folder / "config.json").write_text('{"arguments": {}}')


def attention_error() -> float:
    """Largest difference between the operator and its definition, with large sinks."""
    import torch

    from megasink.attention import attention, reference_attention

    torch.manual_seed(1)
    query, key, value = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    given = {"variant": "sink", "sink_H": 3 * torch.randn(4)}
    found, wanted = (of(query, key, value, **given) for of in (attention, reference_attention))
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def trained(folder: Path) -> dict[str, object]:
    """A step of the attention of transformers and the head-balance loss."""
    import megasink

    hub = megasink.load_model(folder)
    import torch

    import megasink.transformers

    ids = hub.tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    before = hub.model(input_ids=ids).logits
    hub.model.set_attn_implementation("megasink")
    difference = float((hub.model(input_ids=ids).logits - before).abs().max())
    balance = megasink.HeadBalanceLoss(hub.model.train(), coeff=1e-1, scope="microbatch")
    loss = hub.model(input_ids=ids, labels=ids).loss
    loss.backward()
    weight = hub.model.model.layers[0].self_attn.q_proj.weight
    statistics = balance.finish_step()
    balance.remove()
    return {
        "implementation": hub.model.config._attn_implementation,
        "difference": difference,
        "finite": bool(torch.isfinite(weight.grad).all() and weight.grad.abs().sum() > 0),
        "statistics": type(statistics).__name__,
    }


def main(folder: Path) -> None:
    from megasink.cli import COMMANDS, OF_TRAIN

    model, text = folder / "model", folder / "texts"
    told: dict[str, object] = {
        "megatron": importlib.util.find_spec("megatron") is not None,
        "refused": {name: command(name, "--lr", 1) for name in OF_TRAIN},
    }
    told["loaded by refusals"] = sorted({"torch", "numpy", "rich"} & set(sys.modules))
    make_run(folder / "run")
    told["a run"] = command(
        *("analyze", folder / "run", "--data", folder, "--output", folder / "x", "--device", "cpu")
    )
    import pyarrow
    from pyarrow import parquet

    # The three formats that need Arrow.
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    text.mkdir()
    parquet.write_table(pyarrow.table({"text": TEXTS}), text / "a.parquet")
    (text / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (text / "c.jsonl.zst").write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    make_model(model)
    common = ("--data", text, "--device", "cpu", "--seq-length", 12)
    told["analyze"] = command("analyze", model, *common, "--output", folder / "analysis")
    told["report"] = command("report", folder / "analysis", "--output", folder / "report")
    told["ablate"] = command(
        *("ablate", model, *common, "--output", folder / "ablation", "--zeroed", 25, "--seeds", 1)
    )
    told["sweep"] = command(
        *("sweep", model, "--data", text, "--device", "cpu", "--lengths", 6, "--output"),
        folder / "sweep",
    )
    told["doctor"] = command("doctor")
    told["recipes"] = command("recipes", "p2-60m")
    told["attention"] = attention_error()
    told["trained"] = trained(model)
    told["commands"] = sorted(set(COMMANDS) - set(OF_TRAIN))
    told["files"] = sorted(
        str(path.relative_to(folder)) for path in folder.glob("*/*") if path.is_file()
    )
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
