"""Launch scripts that others wrote for Megatron: the first message has every problem of them."""

import json
import os
import re
import tempfile
import textwrap
from pathlib import Path

import pytest

from megasink.data.corpus import Corpus
from megasink.data.hf_tokenizer import train_tokenizer
from megasink.data.preprocess import preprocess
from megasink.training import preflight
from tests.forkserver import server
from tests.training.script_lines import SCRIPTS


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{what stands for a file in the flags: the file}."""
    folder = tmp_path_factory.mktemp("scripts")
    lines = [line for line in Path(textwrap.__file__).read_text().splitlines() if line.strip()]
    texts = [json.dumps({"text": line}) for line in lines * 4]
    (folder / "texts.jsonl").write_text("\n".join(texts))
    corpus, tokenizer = Corpus([str(folder / "texts.jsonl")]), folder / "tokenizer"
    train_tokenizer(corpus, 400, tokenizer)
    preprocess(corpus, folder / "data", tokenizer, workers=1)
    return {"{data}": folder / "data", "{tokenizer}": tokenizer, "{new}": folder / "new"}


def _placed(flags, files):
    return [str(files.get(word, word)) for word in flags]


@pytest.fixture(scope="module")
def first(files):
    """{script: what a launcher without a GPU says of it}."""
    answers = preflight.check(
        preflight.Line(["--device", "cpu", *_placed(script.flags, files)], script.ranks)
        for script in SCRIPTS.values()
    )
    return {name: answer.problems for name, answer in zip(SCRIPTS, answers, strict=True)}


def _groups(words):
    """The flags, each with its values."""
    groups = []
    for word in words:
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _mended(script, problems, files):
    """The command line with what the message asks for."""
    unknown = {}
    for problem in problems:
        if found := re.match(r"unknown: (--[^ =:]+)", problem):
            meant = re.search(r"did you mean (--[^ ?]+)\?$", problem)
            plain = found[1].replace("_", "-")
            unknown[found[1]] = plain if meant and meant[1] == plain else None
    kept = []
    for name, *values in _groups(script.flags):
        name, equals, value = name.partition("=")
        name = unknown.get(name, name)
        if name is not None and name not in {*script.dropped, *script.added}:
            kept += [name, *([value] if equals else []), *values]
    return _placed([*kept, *script.added], files)


@pytest.fixture(scope="module")
def second(first, files):
    """{script: what a rank says of it, once everything is done that the launcher asked for}."""
    lines = [
        (_mended(script, first[name], files), script.mended_ranks)
        for name, script in SCRIPTS.items()
    ]
    with tempfile.TemporaryFile("w+") as given:
        json.dump(lines, given)
        given.seek(0)
        result = server().run(["tests.training.script_worker"], env=dict(os.environ), stdin=given)
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(zip(SCRIPTS, json.loads(result.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_message_names_what_has_to_change(first, name):
    script, text = SCRIPTS[name], "\n".join(first[name])
    for phrase in script.phrases:
        assert phrase in text
    for flag in (w for w in [*script.dropped, *script.added] if w.startswith("--")):
        assert re.search(rf"{flag}\b(?!-)", text), flag


@pytest.mark.parametrize("name", SCRIPTS)
def test_there_is_no_second_message(second, name):
    assert second[name] == []


def test_there_are_thirteen_of_six_projects():
    projects = {script.url.split("/")[3].lower() for script in SCRIPTS.values()}
    assert (len(SCRIPTS), len(projects)) == (13, 6)
