"""A hub name where a folder is expected gets the line that downloads it."""

from pathlib import Path

import pytest

from megasink.cli import main
from megasink.files.system_errors import missing_folder
from tests.analysis.capture.tiny_models import save_with_tokenizer
from tests.hub_server import SHA, serving

NAME = "openai/gpt-oss-20b"
LINE = f"hf download {NAME} --local-dir gpt-oss-20b and pass gpt-oss-20b"
DATA = "--data text.txt --output out"


@pytest.mark.parametrize(
    "line",
    [
        f"analyze {NAME} {DATA}",
        f"ablate {NAME} {DATA}",
        f"sweep {NAME} {DATA} --lengths 8",
        f"evaluate {NAME} --tasks piqa --output out",
        f"finetune {NAME} --data text.txt --output out",
        f"convert-from-hf {NAME} --output out",
        f"data text.txt --output out --tokenizer {NAME}",
    ],
    ids=lambda line: line.split()[0],
)
def test_every_command_answers_with_the_download(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("A text.")
    assert main(line.split()) == 2
    assert LINE in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in Path().iterdir()] == ["text.txt"]


def test_a_path_that_cannot_be_a_name_of_the_hub_gets_no_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for path in ("runs/demo", str(tmp_path / "model"), "model", "a/b/c"):
        assert missing_folder(Path(path)) == f"{path}: no such folder; nothing is downloaded"
    Path("model.gguf").touch()
    assert missing_folder(Path("model.gguf")) == "model.gguf: this is a file: give a folder"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub with a model that has pickles and code beside it, and one that has pickles alone."""
    root = tmp_path_factory.mktemp("hub")
    texts = [f"Text {i}: nothing stands twice, {'again ' * i}and it ends." for i in range(5)]
    (root / "text.txt").write_text("\n".join(texts))
    models = {"org/tiny": Path(save_with_tokenizer(root, "llama", texts, 330))}
    models["org/pickles"] = root / "pickles"
    models["org/pickles"].mkdir()
    (models["org/pickles"] / "config.json").write_text("{}")
    for folder in models.values():
        for name in ("pytorch_model.bin", "modeling_tiny.py", "extra/config.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("not to be fetched")
    with serving(models) as server:
        yield server


def analyze(name, *flags):
    return ["analyze", name, "--data", "text.txt", "--no-loss", "--output", "out", *flags]


def test_a_model_is_fetched_where_that_is_allowed(hub, tmp_path):
    (tmp_path / "text.txt").write_text((hub.models["org/tiny"].parent / "text.txt").read_text())
    asked = len(hub.asked)
    done = hub.run(*analyze("org/tiny"), cwd=tmp_path)
    assert (done.returncode, hub.asked[asked:]) == (2, [])
    assert "add --allow-download, or run hf download org/tiny" in done.stderr
    done = hub.run(*analyze("org/tiny", "--allow-download", "--seq-length", "1"), cwd=tmp_path)
    assert (done.returncode, hub.asked[asked:]) == (2, [])  # nothing for a line that is refused
    done = hub.run(*analyze("org/tiny", "--allow-download"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny, ")  # not the name of the cache's folder
    names = {path.name for path in tmp_path.glob(f"hf/hub/*/snapshots/{SHA}/*")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    fetched = [line for line in hub.asked[asked:] if "/resolve/" in line]
    assert fetched
    assert not [line for line in fetched if line.endswith((".bin", ".py", "extra/config.json"))]
    flags = ("--output", "run", "--allow-download", "--no-verify")
    started = hub.run("convert-from-hf", "org/tiny", *flags, cwd=tmp_path)
    assert started.returncode == 0, started.stderr


@pytest.mark.parametrize(
    ("name", "env", "answer"),
    [
        ("org/nothing", {}, "org/nothing: the hub has no such model"),
        ("org/pickles", {}, "org/pickles on the hub lacks config.json or safetensors"),
        ("org/a b", {}, "org/a b: not a valid name on the Hugging Face hub"),
        (
            "org/tiny",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "org/tiny: http://127.0.0.1:9 did not answer: ",
        ),
    ],
)
def test_what_cannot_be_fetched_is_one_line(hub, tmp_path, name, env, answer):
    (tmp_path / "text.txt").write_text("A text.")
    done = hub.run(*analyze(name, "--allow-download"), cwd=tmp_path, **env)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"megasink: error: {answer}")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("hf/hub/*/snapshots"))
