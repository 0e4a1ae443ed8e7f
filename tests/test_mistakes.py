"""Mistakes that people make at a command line: one line or one numbered list, exit code 2."""

import json
import re
import shlex

import pytest

from megasink.cli import COMMANDS, main
from tests.mistakes import MISTAKES
from tests.probe.tiny_models import save_with_tokenizer

TEXTS = [f"Text {i}: nothing in it stands twice, {'again ' * i}and it ends." for i in range(5)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model of transformers, a text, a data set and a run, as far as their names go."""
    root = tmp_path_factory.mktemp("mistakes")
    save_with_tokenizer(root, "llama", TEXTS, 330)
    (root / "text.txt").write_text("\n".join(TEXTS))
    for suffix in ("bin", "idx"):
        (root / f"tokens.{suffix}").write_bytes(b"")
    checkpoint = root / "run" / "checkpoints" / "iter_0000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("4")
    (root / "notes").mkdir()
    (root / "notes" / "thesis.txt").write_text("text")
    shape = {"num_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    shape |= {"attention_variant": "sink", "head_balance_coeff": 0.0}
    config = {"arguments": shape, "identity": {}}
    (root / "run" / "config.json").write_text(json.dumps(config))
    (root / "run" / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    return root


def test_there_are_sixty_of_them_and_every_command_has_some():
    assert len(MISTAKES) >= 60
    assert {line.split()[0] for line, *_ in MISTAKES.values() if line} >= set(COMMANDS)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line_or_one_list(name, root, capsys):
    line, *phrases = (text.replace("{0}", str(root)) for text in MISTAKES[name])
    before = sorted(root.rglob("*"))
    capsys.readouterr()
    assert main(shlex.split(line)) == 2
    said = [text for text in capsys.readouterr().err.splitlines() if "Loading weights" not in text]
    head, *rest = said
    assert head.startswith("megasink: error: ")
    if rest:
        assert head.endswith(f"{len(rest)} problems in the configuration:")
        assert all(re.match(rf"  {i}\. ", text) for i, text in enumerate(rest, 1))
    for phrase in phrases:
        assert phrase in "\n".join(said)
    assert sorted(root.rglob("*")) == before, "a refused command leaves nothing"
