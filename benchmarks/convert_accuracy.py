"""How far exported models are from the checkpoint: logits of stock transformers, by target.

    python benchmarks/convert_accuracy.py

The tiny models of the tests, with skewed sinks, gates and norms, as bfloat16 checkpoints. Both
sides compute in float32 (what the conversion itself costs) and in bfloat16 (what rounding does),
where the mean distance of each side from float32 is given too.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "granite_swa", "flint")
NAMES += ("granitemoe_swa", "gpt_oss", "lfm3", "qwen3_5", "qwen3_next", "mistral", "nanochat")


def main() -> None:
    """Print a table."""
    sys.path.insert(0, str(ROOT))
    from tests.distributed.layout import SINGLE
    from tests.distributed.pool import Pool

    print(
        "target | float32 | bfloat16 | bfloat16 from float32: Megatron, transformers | same token"
    )
    workers = Pool(1)
    try:
        for name in NAMES:
            with tempfile.TemporaryDirectory() as folder:
                where = {"folder": f"{folder}/run", "name": name}
                workers.run("tests.convert.tasks:save_run", SINGLE, **where, bf16=True)
                (row,) = workers.run("tests.convert.accuracy_tasks:accuracy", SINGLE, folder=folder)
            print(f"{row.pop('target')} | {' | '.join(row.values())}", flush=True)
    finally:
        workers.close()


if __name__ == "__main__":
    main()
