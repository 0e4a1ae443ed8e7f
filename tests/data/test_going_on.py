"""A killed `megasink data` goes on, and parts of several machines make the whole, byte by byte."""

import gzip
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megasink.cli import main
from megasink.data import preprocess as module
from megasink.data import resume
from megasink.data.corpus import Corpus
from megasink.data.dataset_files import Validation, part_of, recorded_validation, validation_of
from megasink.data.encode import Encoder
from megasink.data.indexed_dataset import IndexedWriter, data_problem
from megasink.data.merge import merge
from megasink.data.preprocess import preprocess
from megasink.errors import ConfigError, UserError
from tests.forkserver import ROOT

SUFFIXES = (".bin", ".idx", ".json")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, sources):
    """One of every kind of file, with lines that are no text, empty or blank."""
    folder = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"text": line}) for line in sources[0].splitlines()]
    lines[5:5] = ["", '{"text": null}', '{"text": "\\ud800"}', "  "]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:300]).encode()))
    (folder / "c.txt").write_text(sources[1])
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": sources[2].splitlines()[:300]}), folder / "d.parquet")
    (folder / "e.jsonl").write_text("\n".join(lines))  # no line end
    return [str(folder)]


def contents(prefix, suffixes=SUFFIXES):
    return [(prefix.with_name(prefix.name + s)).read_bytes() for s in suffixes]


def killed_after(batches, monkeypatch):
    """Ends preprocess as a kill does, after so many batches: nothing is cleared or closed."""
    encode = module.encode_in_order

    def some(*args):
        for number, batch in enumerate(encode(*args)):
            if number == batches:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(module, "encode_in_order", some)


def both(prefix, validation):
    """The contents of a data set, and of its validation documents if there are any."""
    return [
        contents(each) for each in ([prefix, validation_of(prefix)] if validation else [prefix])
    ]


@pytest.mark.parametrize("validation", [None, Validation(0.07)], ids=["alone", "validation"])
@pytest.mark.parametrize("batches", [0, 1, 7, 20])
def test_a_run_goes_on_from_any_place(tmp_path, folder, inputs, monkeypatch, batches, validation):
    monkeypatch.setattr(module, "_BATCH_DOCUMENTS", 64)
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0.0)
    options = {"workers": 1, "validation": validation}
    report = preprocess(Corpus(inputs), tmp_path / "whole", folder, **options)
    assert report.skipped.invalid_utf8 == 3
    with monkeypatch.context() as patch:
        killed_after(batches, patch)
        with pytest.raises(KeyboardInterrupt):
            preprocess(Corpus(inputs), tmp_path / "again", folder, **options)
    # What a kill leaves besides: tokens beyond the last record.
    with (tmp_path / "again.bin.partial").open("ab") as file:
        file.write(b"half")
    left = resume.load(tmp_path / "again")
    assert (left.place.documents > 0) == (batches > 0)
    encoded = []
    encode = Encoder.__call__
    monkeypatch.setattr(Encoder, "__call__", lambda s, t: encoded.append(len(t)) or encode(s, t))
    again = preprocess(Corpus(inputs), tmp_path / "again", folder, **options)
    record = again.validation and json.loads((tmp_path / "again.json").read_text())["validation"]
    assert record == (validation and {"share": 0.07, "seed": 1234, "data": "again-validation"})
    whole = tmp_path / "whole"
    of_whole = [
        [p.replace(b'"whole-', b'"again-') for p in parts] for parts in both(whole, validation)
    ]
    assert both(tmp_path / "again", validation) == of_whole
    drawn = report.validation.documents if validation else 0
    assert sum(encoded) == report.documents + drawn - left.place.documents
    assert again.skipped == report.skipped
    names = {p.name for p in tmp_path.iterdir()}
    sets = ("whole", "again", *(("whole-validation", "again-validation") if validation else ()))
    assert names == {f"{name}{suffix}" for name in sets for suffix in SUFFIXES}


def test_validation_documents_are_drawn_from_everywhere(tmp_path, folder, inputs):
    """Each document is in one of the two, in order; each tenth of the corpus gives its share."""
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    preprocess(Corpus(inputs), whole, folder, workers=1)
    draw = Validation(0.05, seed=7)
    report = preprocess(Corpus(inputs), divided, folder, workers=2, validation=draw)
    documents = [list(map(int, d)) for d in IndexedDataset(str(whole))]
    is_drawn = [draw.has(number) for number in range(len(documents))]
    for prefix, expected in ((divided, False), (validation_of(divided), True)):
        of_set = [d for d, drawn in zip(documents, is_drawn, strict=True) if drawn == expected]
        assert [list(map(int, d)) for d in IndexedDataset(str(prefix))] == of_set
        assert json.loads(prefix.with_name(f"{prefix.name}.json").read_text())["tokens"] == sum(
            map(len, of_set)
        )
    tenth = len(documents) // 10
    for start in range(0, 10 * tenth, tenth):
        assert sum(is_drawn[start : start + tenth]) == pytest.approx(0.05 * tenth, abs=1.01)
    assert (
        report.validation.documents == sum(is_drawn) == pytest.approx(0.05 * len(documents), abs=1)
    )
    other = Validation(0.05, seed=8)
    assert [other.has(number) for number in range(len(documents))] != is_drawn
    preprocess(Corpus(inputs), tmp_path / "again", folder, workers=1, validation=draw)
    for suffix in (".bin", ".idx"):
        for name in ("", "-validation"):
            again = tmp_path / f"again{name}{suffix}"
            assert again.read_bytes() == (tmp_path / f"divided{name}{suffix}").read_bytes()


@pytest.mark.parametrize(
    ("documents", "draw", "said"),
    [
        (1, Validation(0.5, seed=2), "training: use a smaller share"),
        (3, Validation(0.05), "validation: use a larger share"),
    ],
)
def test_a_draw_that_leaves_a_data_set_empty_is_refused(tmp_path, folder, documents, draw, said):
    lines = [json.dumps({"text": f"document {n}"}) for n in range(documents)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = Corpus([tmp_path / "a.jsonl"])
    with pytest.raises(UserError, match=rf"--validation {draw.share} of {documents} doc.*{said}"):
        preprocess(corpus, tmp_path / "out", folder, workers=1, validation=draw)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_another_command_starts_over(tmp_path, folder, inputs, monkeypatch):
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(KeyboardInterrupt):
            preprocess(Corpus(inputs), tmp_path / "out", folder, workers=1)
    assert resume.load(tmp_path / "out").place.documents
    other = [f"{inputs[0]}/c.txt"]
    preprocess(Corpus(other), tmp_path / "fresh", folder, workers=1)
    preprocess(Corpus(other), tmp_path / "out", folder, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_after_sigkill_the_same_command_goes_on(tmp_path, inputs, capsys):
    """The command itself, with a tokenizer that it trains, killed while it tokenizes."""
    code = (
        "import signal, sys; from megasink.data import preprocess, resume; "
        "preprocess._SAVE_SECONDS, preprocess._BATCH_DOCUMENTS = 0.0, 8; "
        "from tests.waiting import at_call; at_call(resume, 'save', 5, signal.SIGKILL); "
        "from megasink.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    options = [*inputs, "--train-tokenizer", "400", "--workers", "1", "--output"]
    start = [sys.executable, "-c", code, "data", *options, str(tmp_path / "out")]
    done = subprocess.run(start, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    documents = resume.load(tmp_path / "out").place.documents
    assert documents > 0
    assert main(["data", *options, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"resuming after {documents:,} documents of an earlier run" in said
    assert "trained" not in said
    preprocess(Corpus(inputs), tmp_path / "whole", tmp_path / "out-tokenizer", workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_make_the_whole(tmp_path, folder, inputs, parts):
    preprocess(Corpus(inputs), tmp_path / "whole", folder, workers=1)
    seen = []
    for part in range(1, parts + 1):
        corpus = Corpus(inputs, partition=(part, parts))
        report = preprocess(corpus, part_of(tmp_path / "m", part, parts), folder, workers=1)
        seen.append(report.documents)
    assert min(seen) > 0
    merged = merge(tmp_path / "m")
    complete = json.loads((tmp_path / "whole.json").read_text())
    assert contents(tmp_path / "m", SUFFIXES[:2]) == contents(tmp_path / "whole", SUFFIXES[:2])
    examples = merged["skipped"].pop("examples"), complete["skipped"].pop("examples")
    assert len(examples[0]) == len(examples[1]) == 3
    assert merged == complete


def test_parts_with_validation_are_merged_to_both(tmp_path, folder, inputs):
    reports = [
        preprocess(
            Corpus(inputs, partition=(part, 2)),
            part_of(tmp_path / "m", part, 2),
            folder,
            workers=1,
            validation=Validation(0.05),
        )
        for part in (1, 2)
    ]
    merged = merge(tmp_path / "m")
    assert merged["validation"]["data"] == "m-validation"
    assert recorded_validation(str(tmp_path / "m")) == str(tmp_path / "m-validation")
    drawn = IndexedDataset(str(tmp_path / "m-validation"))
    assert len(drawn) == sum(report.validation.documents for report in reports)
    assert merged["documents"] == sum(report.documents for report in reports)
    assert data_problem(str(tmp_path / "m-validation"), 1024) is None


def test_parts_that_do_not_belong_together(tmp_path, folder, inputs):
    lines = [f"{inputs[0]}/a.jsonl"]
    for part, corpus in ((1, lines), (3, [f"{inputs[0]}/e.jsonl"])):
        prefix = part_of(tmp_path / "m", part, 3)
        preprocess(Corpus(corpus, partition=(part, 3)), prefix, folder, workers=1)
    with pytest.raises(ConfigError, match=r"missing parts: .*m-2-of-3"):
        merge(tmp_path / "m")
    preprocess(Corpus(lines, partition=(1, 3)), tmp_path / "m-2-of-3", folder, workers=1)
    with pytest.raises(ConfigError) as caught:
        merge(tmp_path / "m")
    assert len(caught.value.problems) == 2
    assert "m-2-of-3.json does not describe part 2/3" in caught.value.problems[0]
    assert "m-1-of-3 in inputs: " in caught.value.problems[1]
    assert not (tmp_path / "m.idx").exists()


def test_what_cannot_be_divided_is_refused(inputs):
    with pytest.raises(
        ConfigError, match=r"--partition 1/4: only 1 of the 4 parts would have data"
    ):
        Corpus([f"{inputs[0]}/b.jsonl.gz"], partition=(1, 4))


def test_every_division_of_lines_has_each_line_once(tmp_path):
    lines = ["", "x" * 50, "y", "z" * 3, "ü" * 9, "end"]
    texts = [line for line in lines if line]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": line}, ensure_ascii=False) if line else "" for line in lines)
    )
    (tmp_path / "b.jsonl").write_text('{"text": "after"}\n')
    for parts in range(1, 60):
        read = []
        for part in range(1, parts + 1):
            corpus = Corpus([tmp_path], partition=(part, parts))
            for span in corpus._spans:
                read += [text for _, text, *_ in corpus._lines(span, corpus.start) if text]
        assert read == [*texts, "after"], parts


def test_the_files_are_those_of_megatrons_builder(tmp_path):
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 60_000, length) for length in (5, 0, 1, 700)]
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    writer = IndexedWriter(tmp_path / "ours.bin", tmp_path / "lengths", "int32")
    for document in documents:
        builder.add_document(document, [len(document)])
        writer.add(document[:3], [len(document[:3])], [False])
        assert writer.sync() is None or not len(document)
        writer.add(document[3:], [len(document[3:])])
    builder.finalize(str(tmp_path / "theirs.idx"))
    writer.finish(tmp_path / "ours.idx")
    assert contents(tmp_path / "ours", SUFFIXES[:2]) == contents(tmp_path / "theirs", SUFFIXES[:2])
