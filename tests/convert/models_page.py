"""docs/models.md, from what the models of the collection do.

python -m tests.convert.models_page [NAME ...]    # runs them, and writes the record and the page
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.convert.collection import IMPORTED, REFUSED, config_of
from tests.distributed.layout import SINGLE
from tests.runs import steps

ROOT = Path(__file__).parents[2]
RECORD, PAGE = Path(__file__).with_suffix(".json"), ROOT / "docs" / "models.md"
TASKS = "tests.convert.accuracy_tasks"
TRAIN = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --seq-length 32 --num-workers 0
    --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 1
    --eval-interval 100 --log-interval 1 --device cpu
""".split()
LAYOUTS = {
    "TP 2": ["--tensor-model-parallel-size", "2"],
    "PP 2": ["--pipeline-model-parallel-size", "2"],
}
EXPERTS = """
    --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type alltoall
""".split()
_TEXT = """# Model families

Find out whether a released model can be imported, trained, analyzed and exported. The table is
generated from runs of the models' configurations with small sizes and random weights
(`python -m tests.convert.models_page`), not from reading.

- **import**: the largest difference between megasink's logits and those of transformers, float32.
  Where it exceeds 1e-5, both sides round: against transformers in float64, root mean square errors
  are 1.9e-6 to 4.3e-6 in megasink and 1.9e-6 to 4.2e-6 in transformers
- **train**: layouts in which two steps from the import gave the same losses. With TP 2, models
  with experts also use SP and EP 2
- **transformers**: `analyze` and `zero_heads`, compared with eager attention, and
  `attn_implementation="megasink"` with the head-balance loss, for fine-tuning
- **export**: to the same type, with every weight bit-identical ("rounded": except for the norms)
- **engines**: vLLM 0.33, SGLang 0.5.23 and llama.cpp, if [serving.md](serving.md) lists the type

"""
_HEAD = ("model", "type", "import", "train", "transformers", "export", "engines")


def run(pool: Any, name: str) -> dict[str, Any]:
    """Return what a model of the collection does."""
    kind, keys = IMPORTED[name]
    with tempfile.TemporaryDirectory() as folder:
        where = {"folder": folder, "config": config_of(kind, keys)}
        (report,) = pool.run(f"{TASKS}:import_and_export", SINGLE, **where)
        (refused,) = pool.run(f"{TASKS}:instruments", SINGLE, folder=f"{folder}/hf")
        flags = [*Path(folder, "run/flags.txt").read_text().split(), *TRAIN]
        flags += ["--load", f"{folder}/run/checkpoints", "--finetune"]
        losses = {}
        for layout, chosen in LAYOUTS.items():
            to = Path(folder, layout.replace(" ", ""))
            experts = EXPERTS if "--num-experts" in flags and layout == "TP 2" else []
            pool.train([*flags, *chosen, *experts, "--run-dir", str(to)], 2)
            losses[layout] = [step["lm_loss"] for step in steps(to)]
    tp, pp = losses.values()
    same = all(abs(a - b) <= 1e-4 * abs(a) for a, b in zip(tp, pp, strict=True))
    return {
        "type": kind,
        "logits": float(f"{report['logits']:.1g}"),
        "layouts": list(LAYOUTS) if same else [],
        "refused": refused,
        "export": report["target"] if not report["differ"] else None,
    }


def recorded() -> dict[str, Any]:
    """Return {model: what it did}."""
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {name: record[name] for name in IMPORTED if name in record}


def page(record: dict[str, Any]) -> str:
    """Return the page."""
    from megasink.convert.targets import TARGETS
    from megasink.convert.targets.target import ENGINES

    lines = [_row(_HEAD), _row(["---"] * len(_HEAD))]
    for name, did in record.items():
        found = zip(ENGINES, TARGETS[did["type"]].engines, strict=False)
        engines = [engine.split()[0] for engine, ignored in found if ignored is not None]
        cells = (name, f"`{did['type']}`", f"{did['logits']:.0e}", ", ".join(did["layouts"]))
        works = "no" if any(did["refused"].values()) else "yes"
        export = "yes" if did["export"] else "rounded"
        lines.append(_row((*cells, works, export, ", ".join(engines) or "not tried")))
    refused = [_row(("refused", "type", "reason")), _row(["---"] * 3)]
    for name, (kind, _, said) in REFUSED.items():
        reason = "no conversion target" if "cannot be imported" in said else said.partition("|")[0]
        refused.append(_row((name, f"`{kind}`", reason)))
    return _TEXT + "\n".join(lines) + "\n\n" + "\n".join(refused) + "\n"


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    from tests.distributed.pool import Pool

    with Pool(2) as pool:
        for name in sys.argv[1:] or IMPORTED:
            record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
            did = run(pool, name)
            print(name, did, flush=True)
            RECORD.write_text(json.dumps(record | {name: did}, indent=1) + "\n")
    PAGE.write_text(page(recorded()))


if __name__ == "__main__":
    main()
