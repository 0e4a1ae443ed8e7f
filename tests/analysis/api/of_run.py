"""``python -m tests.analysis.api.of_run FOLDER``: the Python API on test_start_to_end.py's run."""

import sys
from pathlib import Path

import megasink
from tests.forkserver import ROOT

folder = Path(sys.argv[1])
loaded = megasink.load_run(folder / "run", device="cpu")
options = {"seq_length": 32, "max_samples": 4}
found = megasink.analyze(loaded, ROOT / "docs", name="run", **options)
written = megasink.read_analysis(folder / "run-page")
assert {name: found[name].number for name in found} == {
    name: written[name].number for name in written
}
with megasink.zero_heads(loaded.model, [(0, 0)]):
    pass
again = megasink.convert_to_hf(folder / "run", folder / "again")
weights = "model.safetensors"
assert (again / weights).read_bytes() == (folder / "hf" / weights).read_bytes()
print(repr(found))
