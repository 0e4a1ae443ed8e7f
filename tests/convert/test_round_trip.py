"""Every target: the logits of stock transformers, and the same bytes after a way back.

Not covered: TransformerEngine's spec (its keys, by tests/convert/test_reader.py, are), CUDA.
"""

import json

import pytest

from tests.convert.models import MODELS
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.pool import Pool

TASKS = "tests.convert.tasks"
TP2_PP2 = Layout(tp=2, pp=2)


@pytest.fixture(scope="module")
def pool():
    """Workers of its own: four of them, for tensor and pipeline parallelism at once."""
    workers = Pool(4)
    yield workers
    workers.close()


@pytest.mark.parametrize("name", MODELS)
def test_every_target(pool, tmp_path, name):
    pool.run(f"{TASKS}:save_run", SINGLE, folder=str(tmp_path / "run"), name=name)
    (report,) = pool.run(f"{TASKS}:round_trip", SINGLE, folder=str(tmp_path), name=name)
    assert report["target"] == MODELS[name][0]
    exported, imported = report["differences"]
    for difference in (exported, imported):
        assert 0 < difference["logits"] <= difference["tolerance"]
        assert difference["largest"] > 3  # small logits would hide a mistake
        assert difference["argmax"] == difference["generated"] == 1
    assert exported["logits"] == imported["logits"]  # the same weights, to the bit
    assert report["equal"]
    assert report["architecture"]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vocab_size"] == 101


@pytest.mark.parametrize("name", ["granite_swa", "qwen3_5", "lfm3", "granitemoe_swa"])
def test_the_layout_of_a_run_does_not_matter(pool, tmp_path, name):
    for layout in (SINGLE, TP2_PP2):
        run, hf = tmp_path / f"run-{layout}", tmp_path / f"hf-{layout}"
        pool.run(f"{TASKS}:save_run", layout, folder=str(run), name=name)
        pool.run(f"{TASKS}:export_only", SINGLE, run=str(run), output=str(hf))
    files = [tmp_path / f"hf-{layout}" / "model.safetensors" for layout in (SINGLE, TP2_PP2)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", ["qwen3_5", "lfm3", "mixtral"])
def test_an_import_loads_under_another_layout(pool, tmp_path, name):
    pool.run(f"{TASKS}:save_run", SINGLE, folder=str(tmp_path / "run"), name=name)
    pool.run(f"{TASKS}:round_trip", SINGLE, folder=str(tmp_path), name=name)
    checkpoint = str(tmp_path / "back" / "checkpoints" / "iter_0000000")
    layout = Layout(tp=2, sp=True, pp=2) if MODELS[name][1].experts else TP2_PP2
    reports = pool.run(f"{TASKS}:loaded_weights", layout, checkpoint=checkpoint, name=name)
    assert reports == [[]] * 4
