"""Folders of results: one process at a time, and nothing replaced unless somebody insists."""

import json
import threading
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megasink.analysis import open_model
from megasink.analysis.pages import ablation_page, sweep_page
from megasink.analysis.pages import analysis_page as pages
from megasink.cli import main
from megasink.errors import UserError
from megasink.files.output_folder import SETTINGS, exclusive, results_in
from tests.analysis.capture.tiny_models import save_with_tokenizer, tiny_model

TEXTS = [f"Text {i}: nothing in it stands twice, {'again ' * i}and it ends." for i in range(5)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        save_with_tokenizer(root, "llama", TEXTS, 330)
    )
    tiny_model("gpt-oss", vocab_size=len(tokenizer)).save_pretrained(root / "gpt-oss")
    tokenizer.save_pretrained(root / "gpt-oss")
    (root / "text.txt").write_text("\n".join(TEXTS))
    for name in ("a", "b"):
        (root / name).mkdir()
        lines = [{"iteration": n, "lm_loss": 2.0, "seconds": 1, "tokens": n} for n in (1, 2)]
        (root / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return root


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr(pages, "figures", lambda *_: [])
    monkeypatch.setattr(ablation_page, "pictures", lambda *_: [])
    monkeypatch.setattr(sweep_page, "pictures", lambda *_: [])


TEXT = "--data {0}/text.txt --device cpu --output"
# What is made, what is made there next, what its message says, and the file that must stay.
COMMANDS = {
    "analyze": (
        f"analyze {{0}}/llama --no-loss {TEXT} {{1}}/out",
        "--positions 8 --seq-length 8",
        ("results of other settings (--seq-length not given -> 8; --positions 64 -> 8)",),
        "out/results.json",
    ),
    "analyze-other-model": (
        f"analyze {{0}}/llama --name mine --no-loss {TEXT} {{1}}/out",
        "ANOTHER",
        ("results of other settings (", "model LlamaForCausalLM -> GptOssForCausalLM", "weights "),
        "out/results.json",
    ),
    "sweep": (
        f"sweep {{0}}/llama --lengths 4 {TEXT} {{1}}/out",
        "--lengths 4 6",
        ("--lengths 4 -> 4 6",),
        "out/sweep.json",
    ),
    "ablate": (
        f"ablate {{0}}/llama --heads 0.1 0.2 {TEXT} {{1}}/out",
        "--heads 0.1",
        ("--heads 0.1 0.2 -> 0.1",),
        "out/ablation.json",
    ),
    "compare": (
        "compare {0}/a {0}/b --output {1}/out.png",
        "--x tokens",
        ("out.png was written by `megasink compare a b --x step --smoothing 0.9",),
        "out.png",
    ),
    "compare-one": (
        "compare {0}/a --output {1}/out.png",
        "ANOTHER",
        ("out.png was written by `megasink compare a ",),
        "out.html",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_results_of_other_settings_stay(root, tmp_path, capsys, monkeypatch, name):
    line, more, phrases, result = COMMANDS[name]
    first = line.format(root, tmp_path).split()
    other = [*first, *more.split()]
    if more == "ANOTHER":
        other = [w.replace("/llama", "/gpt-oss").replace(f"{root}/a", f"{root}/b") for w in first]
    assert main(first) == 0
    before = (tmp_path / result).read_bytes()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        if name != "analyze-other-model":  # only its weights tell
            patch.setattr(open_model, "prepare_quietly", None)
            patch.setattr("megasink.transformers.load_hf_folder.load", None)
        assert main(other) == 2
    said = capsys.readouterr().err
    assert [phrase for phrase in phrases if phrase not in said] == []
    assert "or pass --overwrite" in said
    assert (tmp_path / result).read_bytes() == before
    if name != "analyze-other-model":
        assert main([*other, "--overwrite"]) == 0
        assert name == "compare-one" or (tmp_path / result).read_bytes() != before
    if name in ("ablate", "compare", "compare-one"):
        assert main(other) == 0  # its own results it replaces unasked


def test_a_sweep_that_has_all_it_had_goes_on(root, tmp_path):
    line = COMMANDS["ablate"][0].format(root, tmp_path).split()
    assert main(line) == 0
    assert main([*line, "--heads", "0.1", "0.2", "0.3", "--layer", "1"]) == 0


def test_an_unfinished_analysis_is_replaced_where_asked(root, tmp_path, capsys):
    line = COMMANDS["analyze"][0].format(root, tmp_path).split()
    (tmp_path / "out" / "partial").mkdir(parents=True)
    (tmp_path / "out" / "partial" / "analysis.json").write_text('{"weights": "x"}')
    assert main(line) == 2
    assert (
        "holds an unfinished analysis with other settings (weights x -> " in capsys.readouterr().err
    )
    assert main([*line, "--overwrite"]) == 0
    assert not (tmp_path / "out" / "partial").exists()


def test_a_report_stays_and_an_analysis_gets_its_own_page(root, tmp_path, capsys):
    for name in ("one", "two"):
        words = COMMANDS["analyze"][0].format(root, tmp_path).split()
        assert main([*words[:-1], f"{tmp_path}/{name}", "--name", name]) == 0
    one, two, page = tmp_path / "one", tmp_path / "two", str(tmp_path / "page")
    assert main(["report", str(one), "--output", str(one)]) == 0
    assert main(["report", str(one), str(two), "--output", page]) == 0
    capsys.readouterr()
    before = Path(page, "report.html").read_text()
    for line in (
        [str(one), "--output", page],
        [str(one), str(two), "--output", str(two)],
        [str(one), "--output", str(root)],
    ):
        assert main(["report", *line]) == 2
    said = capsys.readouterr().err
    assert "results of other settings (analyses /" in said
    assert "two contains results of megasink analyze: choose" in said
    assert "which is not a megasink result: choose another" in said
    assert Path(page, "report.html").read_text() == before
    assert main(["report", str(one), "--output", page, "--overwrite"]) == 0


@pytest.mark.parametrize("there", ["notes.txt", "results.json", "figures/a.png"])
def test_what_is_of_nobody_stays_too(root, tmp_path, capsys, there):
    (tmp_path / "out" / there).parent.mkdir(parents=True)
    (tmp_path / "out" / there).write_text("mine")
    assert main(COMMANDS["sweep"][0].format(root, tmp_path).split()) == 2
    name = there.partition("/")[0]
    assert f"out contains {name}, which is not" in capsys.readouterr().err
    assert (tmp_path / "out" / there).read_text() == "mine"


def test_a_file_of_nobody_is_no_picture(root, tmp_path, capsys):
    for content in (b"mine", b"\x89PNG\r\n\x1a\n" + b"\0" * 40):
        (tmp_path / "out.png").write_bytes(content)
        for name in ("compare", "compare-one"):
            assert main(COMMANDS[name][0].format(root, tmp_path).split()) == 2
            assert (
                "out.png exists and was not written by megasink: choose" in capsys.readouterr().err
            )
        assert (tmp_path / "out.png").read_bytes() == content


def test_one_process_at_a_time(root, tmp_path, capsys):
    line = COMMANDS["analyze"][0].format(root, tmp_path).split()
    with exclusive(tmp_path / "out"):
        assert main(line) == 2
        assert "another run is writing" in capsys.readouterr().err
        assert main(["report", str(root), "--output", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()  # it was new, and stayed empty
    assert main(line) == 0
    assert [path.name for path in (tmp_path / "out").glob(".*")] == []


def test_of_many_that_begin_at_once_one_writes(tmp_path):
    began, ended, refusals = threading.Barrier(8), threading.Barrier(8), []

    def begin(number):
        began.wait()
        try:
            with results_in(tmp_path / "out", "x", {"number": number}) as record:
                ended.wait(600)
                record()
        except UserError as error:
            refusals.append(str(error))
            ended.wait(600)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refusals) == 7
    assert all("another run is writing" in text for text in refusals)
    assert json.loads((tmp_path / "out" / SETTINGS).read_text())["command"] == "x"


@pytest.mark.parametrize("content", ["[]", "{", '{"command": "x", "settings": 3}', "{}"])
def test_a_record_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / SETTINGS).write_text(content)
    with pytest.raises(UserError), results_in(tmp_path, "x", {}):
        pass
