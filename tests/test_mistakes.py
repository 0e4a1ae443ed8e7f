"""Mistakes that people make at a command line: one line or one numbered list, exit code 2."""

import re
import shlex

import pytest

from megasink.cli import COMMANDS, main
from tests.errors_page import answer, page, prepare, shown
from tests.mistakes import MISTAKES, SLOW
from tests.test_startup import answers


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("mistakes")
    prepare(root)
    return root


def test_there_are_sixty_of_them_and_every_command_has_some():
    assert len(MISTAKES) >= 60
    assert {line.split()[0] for line, *_ in MISTAKES.values() if line} >= set(COMMANDS)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line_or_one_list(name, root):
    phrases = [text.replace("{0}", str(root)) for text in MISTAKES[name][1:]]
    before = sorted(root.rglob("*"))
    said = answer(name, root, main)
    head, *rest = said
    assert head.startswith("megasink: error: ")
    if rest:
        assert head.endswith(f"{len(rest)} problems in the configuration:")
        assert all(re.match(rf"  {i}\. ", text) for i, text in enumerate(rest, 1))
    for phrase in phrases:
        assert phrase in "\n".join(said)
    assert sorted(root.rglob("*")) == before, "a refused command leaves nothing"


def test_a_mistake_is_answered_before_anything_slow_is_imported(root):
    """So each takes some tenths of a second of one core, where torch alone takes more than one."""
    texts = [line for name, (line, *_) in MISTAKES.items() if name not in SLOW]
    lines = [shlex.split(line.replace("{0}", str(root))) for line in texts]
    slow = "torch scipy sklearn matplotlib transformers megatron lm_eval.api"
    assert answers(lines, slow) == f"{len(lines)} lines"


def test_the_page_has_every_mistake_under_its_command():
    text = page({name: shown(name, ["megasink: error: x"], "/tmp/x") for name in MISTAKES})
    assert text.count("\n    $ megasink") == text.count("megasink: error: x") == len(MISTAKES)
    for part in text.split("\n## megasink ")[1:]:
        command, *lines = part.splitlines()
        named = {line.split()[2] for line in lines if re.match(r"    \$ megasink \w", line)}
        assert named == {command} or (command == "COMMAND" and not named & set(COMMANDS))
