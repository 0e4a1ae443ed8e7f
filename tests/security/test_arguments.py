"""The arguments of a run that somebody else made describe a model, and do nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import train_tokenizer
from tests.distributed.layout import SINGLE

TASKS = "tests.security.tasks"


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    """A run folder of a tiny model."""
    folder = tmp_path_factory.mktemp("genuine")
    text = Path(json.__file__).read_text() * 2
    train_tokenizer([Document(text, "test")], 400, folder / "tokenizer")
    options = {"folder": str(folder / "run"), "name": "sink-text"}
    options["tokenizer"] = str(folder / "tokenizer")
    pool.run("tests.convert.tasks:save_run", SINGLE, **options)
    return folder / "run"


def test_no_argument_that_a_model_reads_is_forgotten(pool, run):
    (found,) = pool.run(f"{TASKS}:arguments_read", SINGLE, run=str(run))
    assert {"hidden_size", "attention_variant", "rotary_base", "mscale"} <= set(found["taken"])
    assert found["forgotten"] == []


def test_a_crafted_run_names_no_place_and_no_module(pool, run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = json.loads((copy / "config.json").read_text())
    module = tmp_path / "crafted_module.py"
    module.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef spec(*_): pass\n")
    config["arguments"] |= {
        "config_logger_dir": str(tmp_path / "written"),
        "spec": ["crafted_module", "spec"],
        "plugin": ["crafted_module"],
        "fp8_quantizer_factory": "crafted_module.spec",
        "data_cache_path": str(tmp_path / "written"),
        "activation_func": "crafted_module.spec",
        "cross_entropy_fusion_impl": "../native\x1b[31m",
    }
    (copy / "config.json").write_text(json.dumps(config))
    others = shutil.copytree(copy, tmp_path / "others")
    config["arguments"] |= {"normalization": "../RMSNorm", "ffn_activation": "swiglu\x1b[31m"}
    (others / "config.json").write_text(json.dumps(config))
    commands = [
        ["generate", str(run), "--prompt", "def", "--max-new-tokens", "2", "--device", "cpu"]
        for run in (copy, others)
    ]
    folders = {"run": str(copy), "written": str(tmp_path / "control"), "path": str(tmp_path)}
    (answers,) = pool.run("tests.training.generate_tasks:megasink", SINGLE, commands=commands)
    (_, _, errors), (code, _, refused) = answers
    assert code == 2
    assert "others/config.json: ffn_activation is 'swiglu\\x1b[31m': " in refused
    assert "(also wrong: normalization)" in refused
    assert "\x1b" not in refused
    (line,) = (x for x in errors.splitlines() if "and are ignored: " in x)
    for name in ("config_logger_dir", "spec", "fp8_quantizer_factory", "cross_entropy"):
        assert name in line
    assert "\x1b" not in errors
    assert not (tmp_path / "written").exists()
    assert not (tmp_path / "imported").exists()
    pool.run(f"{TASKS}:model_that_names_places", SINGLE, **folders)
    assert (tmp_path / "control").exists()
    assert (tmp_path / "imported").exists()
