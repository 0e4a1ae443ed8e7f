"""Names and texts from outside reach a terminal, a log and a table as text, not as commands."""

import csv
import io
import os
import sys

import pytest

from megasink.analysis.capture.input_samples import dataset_names
from megasink.analysis.result_store import write_csv
from megasink.cli import generate
from megasink.cli import main as megasink
from megasink.console import signals
from megasink.console.printable import printable
from megasink.data.corpus import Corpus, Document
from megasink.errors import ConfigError, UserError
from megasink.files.atomic import atomic_text
from megasink.files.checked_fields import from_json
from megasink.files.output_folder import refuse_others
from megasink.training import stop

# Clears the screen, sets the title, writes to the clipboard, turns the rest around.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x1b]52;c;cm0=\x07\x9b31m\u202eexe.txt"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("naïve 日本語 😀", "naïve 日本語 😀"),
        ("\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}", "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}"),
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b31m\x7f\r\b\0", "\\x9b31m\\x7f\\r\\x08\\x00"),
        ("a\u202eb\u2066c\ufeffd\u2028e", "a\\u202eb\\u2066c\\ufeffd\\u2028e"),
        (os.fsdecode(b"\xff.txt"), "\\udcff.txt"),
    ],
)
def test_what_a_terminal_obeys_is_escaped(text, shown):
    assert printable(text) == shown
    shown.encode()


def test_every_error_is_one_line_or_a_list():
    assert str(UserError(f"{HOSTILE}\nmegasink: done")) == (
        "\\x1b[2J\\x1b]0;owned\\x07\\x1b]52;c;cm0=\\x07\\x9b31m\\u202eexe.txt\\nmegasink: done"
    )
    error = ConfigError(["one\nmore", "two"])
    assert str(error) == "2 problems in the configuration:\n  1. one\\nmore\n  2. two"
    assert error.problems == ["one\\nmore", "two"]


def test_the_message_of_a_rank_ends_where_it_ends(tmp_path):
    text = f"noise\nmegasink: error: {ConfigError(['one', 'two'])}\nleaked 4 instances!\n"
    (tmp_path / "stderr.log").write_text(text)
    message = stop.first_error(tmp_path)
    assert message == "2 problems in the configuration:\n  1. one\n  2. two"


def test_names_of_files_in_every_answer_are_escaped(tmp_path, capsys):
    hostile = tmp_path / (HOSTILE.replace("/", "") + ".jsonl")
    hostile.write_text("no JSON\n")
    run = tmp_path / f"[bold]{HOSTILE}"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    tokenizer = ["--train-tokenizer", "400", "--workers", "1", "--output"]
    lines = [
        (2, ["data", str(hostile), *tokenizer, str(tmp_path / "a")]),
        (2, ["data", str(tmp_path / f"gone {HOSTILE}"), *tokenizer, str(tmp_path / "b")]),
        (2, ["generate", str(run), "--prompt", "x"]),
        (2, ["compare", str(tmp_path / HOSTILE)]),
        (0, ["compare", str(run), "--output", str(tmp_path / "compare.png")]),
        (2, ["train", "--run-dir", str(run)]),
        (2, ["train", "--run-dir", str(run), "--resume"]),
    ]
    for code, line in lines:
        assert megasink(line) == code, line
        out, err = capsys.readouterr()
        said = out + err
        assert printable(said) == said, line
        assert "x1b" in said, line
        assert "[bold]" in said or str(run) not in line  # no markup of rich's
        if code:
            assert err.count("\n") == 1 or "problems in" in err


class Tokenizer:
    """Its tokens are code points."""

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_does_not_obey_what_a_model_writes(monkeypatch, terminal):
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", output)
    for prompts in ([[ord("a")]], [[ord("a")], [ord("b")]]):
        shown = generate._Shown(Tokenizer(), prompts, (), stream=terminal and len(prompts) == 1)
        for token in map(ord, HOSTILE + "\n"):
            shown.add(0, token)
        shown.finish()
    if terminal:
        assert printable(output.getvalue()) == output.getvalue()
        assert "a\\x1b[2J" in output.getvalue()
    else:
        assert f"a{HOSTILE}\n" in output.getvalue()  # a file or a pipe gets what was made


def test_cells_are_text_and_numbers_and_no_formulas(tmp_path):
    path = tmp_path / "table.csv"
    cells = ["=1+1", "+1", "-1", "@sum", "\tx", "\rx", "a=b", HOSTILE, -1.5, 3, None, True]
    write_csv(path, ["=name", "value"], [{"=name": "x", "value": cell} for cell in cells])
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["'=name", "value"]
    assert [row[1] for row in rows] == [
        *("'=1+1", "'+1", "'-1", "'@sum", "'\\tx", "'\\rx", "a=b", printable(HOSTILE)),
        *("-1.5", "3", "", "True"),
    ]


def test_a_file_name_that_is_not_utf8_is_escaped_or_refused(tmp_path, capsys):
    path = tmp_path / os.fsdecode(b"t\xff.txt")
    path.write_text("a text")
    (document,) = Corpus([path])
    assert document.source.endswith("t\\udcff.txt")
    assert dataset_names([str(path)]) == ["t\\udcff"]
    with pytest.raises(UserError, match=r"--output .*t\\udcff\.txt is not UTF-8"):
        refuse_others(path, "analyze", {})
    assert signals.run(lambda: len(os.fspath(path).encode())) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{printable(str(path))} is not UTF-8" in line
    assert from_json(Document, {"text": "a", "source": str(path)}, "it").source.endswith("t?.txt")
    atomic_text(tmp_path / "page", f"{path}")
    assert (tmp_path / "page").read_text().endswith("t\\udcff.txt")
