"""The README.md of an exported model: how it was trained, and which papers to cite."""

from pathlib import Path
from typing import Any

import megasink
from megasink.checkpoints.find import Checkpoint
from megasink.console.papers import cited
from megasink.convert.architecture import Architecture
from megasink.convert.targets.target import Target
from megasink.errors import UserError
from megasink.files.json_file import objects_in, read_text

_OWN_CODE = """

No architecture of transformers supports this model: loading it requires `trust_remote_code=True`,
which runs the files `*_megasink.py` in this folder. They import only torch and transformers, read
no files and open no connections."""

# {key of metrics.jsonl: row}
_SHOWN = {
    "tokens": "training tokens",
    "lm_loss": "training loss",
    "valid_lm_loss": "validation loss",
    "valid_bits_per_byte": "validation bits per byte",
    "test_lm_loss": "test loss",
    "test_bits_per_byte": "test bits per byte",
    "imbalance": "head imbalance",
}


def _numbers(layers: tuple[bool, ...]) -> str | None:
    return ", ".join(str(n) for n, has in enumerate(layers) if has) or None


def model_card(
    model: Architecture, target: Target, saved: dict[str, Any], checkpoint: Checkpoint
) -> str:
    """Return Markdown with the front matter that the Hugging Face Hub reads."""
    rows = [
        ("attention", model.attention),
        ("layers with this attention (others: softmax)", _numbers(model.variant_layers)),
        ("layers with gated delta-net instead", _numbers(model.linear_layers)),
        ("layers", model.layers),
        ("hidden size", model.hidden),
        (
            "query heads, key/value groups, head dim",
            f"{model.heads}, {model.groups}, {model.head_dim}",
        ),
        ("FFN width", model.ffn),
        (
            "experts, active per token",
            f"{model.experts}, {model.topk}" if model.experts else "none",
        ),
        ("vocabulary size", model.vocabulary),
        ("maximum positions", model.positions),
        ("dtype", model.dtype),
        ("training steps", checkpoint.iteration),
        ("global batch size, sequence length", _both(saved, "global_batch_size", "seq_length")),
        ("learning rate", saved.get("lr")),
        (
            "head-balance coefficient, scope",
            _both(saved, "head_balance_coeff", "head_balance_scope"),
        ),
        *_metrics(checkpoint),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows if value is not None)
    papers = [cited("P1")] if model.variant.explicit_gate else []
    if model.has_sink or saved.get("head_balance_coeff"):
        papers.append(cited("P0"))
    references = "".join(f"- {paper}\n" for paper in papers)
    remote = ", trust_remote_code=True" if target.custom_code else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- megasink
---

# {target.architecture}

Trained with Megatron-Core and converted with megasink {megasink.__version__}.
Requires transformers {target.since} or later.{_OWN_CODE if target.custom_code else ""}
{"".join(f"{line}.{chr(10)}" for line in target.misread(model))}
| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER"{remote})
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

## Citation

{references or "megasink (https://pypi.org/project/megasink)"}
"""


def _both(saved: dict[str, Any], first: str, second: str) -> str | None:
    """Return two of the run's arguments; None if the first one is not set."""
    return f"{saved[first]}, {saved.get(second)}" if saved.get(first) else None


def _metrics(checkpoint: Checkpoint) -> list[tuple[str, Any]]:
    """Return the last values in metrics.jsonl up to the exported step, naming any other step."""
    path = Path(checkpoint.config).parent / "metrics.jsonl"
    last: dict[str, tuple[float, int]] = {}
    try:
        lines = read_text(path, errors="replace").splitlines()
    except UserError:
        return []
    for entry in objects_in(lines):
        step = entry.get("iteration")
        if isinstance(step, int) and step <= checkpoint.iteration:
            found = {key: entry[key] for key in _SHOWN if key in entry}
            last |= {k: (v, step) for k, v in found.items() if isinstance(v, int | float)}
    rows = []
    for key, title in _SHOWN.items():
        if key in last:
            value, step = last[key]
            at = "" if step == checkpoint.iteration else f", at step {step:,}"
            rows.append((title, f"{value:,.6g}{at}"))
    return rows
