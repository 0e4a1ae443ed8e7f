"""A hub name where a folder is expected gets the line that downloads it."""

from pathlib import Path

import pytest

from megasink.cli import main
from megasink.errors import missing_folder

NAME = "openai/gpt-oss-20b"
LINE = f"hf download {NAME} --local-dir gpt-oss-20b and give gpt-oss-20b"
DATA = "--data text.txt --output out"


@pytest.mark.parametrize(
    "line",
    [
        f"analyze {NAME} {DATA}",
        f"ablate {NAME} {DATA}",
        f"sweep {NAME} {DATA} --lengths 8",
        f"evaluate {NAME} --tasks piqa --output out",
        f"finetune {NAME} --data text.txt --output out",
        f"convert-from-hf {NAME} out",
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
