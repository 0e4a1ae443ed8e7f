"""``python -m tests.analysis.api.of_run FOLDER``: the Python API on test_start_to_end.py's run."""

import os
import sys
from pathlib import Path

import megasink
from tests.forkserver import ROOT
from tests.runs import SOURCES

folder = Path(sys.argv[1])
loaded = megasink.load_run(folder / "run", device="cpu")
options = {"seq_length": 32, "max_samples": 4}
found = megasink.analyze(loaded, SOURCES, name="run", **options)
written = megasink.read_analysis(folder / "run-page")
assert {name: found[name].number for name in found} == {
    name: written[name].number for name in written
}
ids = loaded.tokenizer("Heads that rest")["input_ids"]
name = "layers.0.gated_out"
with megasink.zero_heads(loaded, "0.0"):
    cache = loaded.run_with_cache(ids, name)[1]
assert not cache[name][:, :, 0].any()
assert cache[name][:, :, 1].any()
with loaded.hooks({name: cache[name]}):
    assert (loaded.run_with_cache(ids, name)[1][name] == cache[name]).all()
again = megasink.convert_to_hf(folder / "run", folder / "again")
weights = "model.safetensors"
assert (again / weights).read_bytes() == (folder / "hf" / weights).read_bytes()
# The block of docs/python.md, in a folder with its run and text.
runs = folder / "page" / "runs" / "mine"
runs.mkdir(parents=True)
(runs / "sink").symlink_to(folder / "run")
(folder / "page" / "texts.jsonl").write_text('{"text": "A head rests where nothing is asked."}\n')
os.chdir(folder / "page")
block = (ROOT / "docs/python.md").read_text().split("## A run")[1].split("```python\n")[1]
exec(compile(block.split("```")[0], "docs/python.md", "exec"), {"megasink": megasink, "Path": Path})
assert Path("sink-hf", weights).read_bytes() == (again / weights).read_bytes()
try:
    megasink.load_run(runs)
except megasink.UserError as error:
    assert str(error) == f"{runs} is a folder of runs: choose {runs / 'sink'}"  # noqa: PT017
else:
    raise AssertionError("a folder of runs is no run")
print(repr(found))
