"""Context extension in small: the trainer takes the flags of both stages."""

from examples.replicate import context
from tests.parsing import read


def test_the_trainer_takes_the_flags(tmp_path):
    data = tmp_path / "data"
    (data / "tokenizer").mkdir(parents=True)
    for variant in context.VARIANTS:
        (tmp_path / f"{variant}-1-short" / "checkpoints").mkdir(parents=True)
    for name in ("short", "long"):
        for end in ("bin", "idx"):
            (data / f"{name}.{end}").touch()
    found = [step for name in context.VARIANTS for step in context.steps(tmp_path, name, 1)]
    assert len(found) == 6
    for step in found:
        words = [str(word) for word in step.command]
        at = words.index("--ranks")  # the launcher's
        words = words[1:at] + words[at + 2 :]
        assert read(words).flag_problems == []
    assert "--rotary-base" in found[1].command
    assert "--load" in found[1].command
