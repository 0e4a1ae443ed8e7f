"""Write the reference of errors: ``python -m tests.errors_page FILE``.

It has the answers to tests/mistakes.toml. `make docs` puts it into the site. It is not committed,
and no test compares its words.
"""

import contextlib
import io
import json
import shlex
import sys
import tempfile
from pathlib import Path

from megasink.cli import COMMANDS, main
from megasink.data.corpus import Corpus
from megasink.data.preprocess import preprocess
from tests.analysis.capture.tiny_models import save_with_tokenizer
from tests.mistakes import BEGINNINGS, MISTAKES

HEAD = """\
# Errors and what to do

An error is one line, or one numbered list of all problems with a command line. It names the problem
and the value, and says what to do. The exit code is 2, and nothing half-written is left. If you
see a traceback, please report it as a bug.

| problem | see |
|---|---|
| a command line | below: mistakes in every command, with the answers as printed |
| a run that stopped, was killed or cannot resume | [survival.md](survival.md) |
| damaged or hostile inputs | [survival.md](survival.md#damaged-and-hostile-inputs) |
| a refused Megatron flag | [features.md](features.md#megatrons-features) |
| a kernel that does not run, a missing or old package | `megasink doctor` |
| a rank on another host | [launch.md](launch.md#when-a-host-is-lost) |
| a model that cannot be exported or imported | [convert.md](convert.md) |
| a data set in an object store | [object-stores.md](object-stores.md) |

In the commands below `...` stands for the correct flags.
"""
TEXTS = [f"Text {i}: nothing in it stands twice, {'again ' * i}and it ends." for i in range(5)]


def prepare(root):
    """Put a model of transformers, a text, a data set and a run there, as far as names go."""
    save_with_tokenizer(root, "llama", TEXTS, 330)
    (root / "text.txt").write_text("\n".join(TEXTS))
    (root / "lines.jsonl").write_text("".join(f'{{"text": "text {i}"}}\n' for i in range(2000)))
    preprocess(Corpus([str(root / "lines.jsonl")]), root / "tokens", root / "llama", workers=1)
    checkpoint = root / "run" / "checkpoints" / "iter_0000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("4")
    (root / "kinds.json").write_text('[{"kind": "zero-head", "heads": [[0, 1]]}]')
    value = {"kind": "steer-gates", "heads": [[0, 1]], "scale": -1}
    (root / "value.json").write_text(json.dumps([value]))
    (root / "notes").mkdir()
    (root / "notes" / "thesis.txt").write_text("text")
    shape = {"num_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    shape |= {"attention_variant": "sink", "head_balance_coeff": 0.0}
    config = {"arguments": shape, "identity": {}}
    (root / "run" / "config.json").write_text(json.dumps(config))
    (root / "run" / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')


def answer(name, root, run):
    """The lines on stderr, of what ``run``, given the words of the command, prints there."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run(shlex.split(MISTAKES[name][0].replace("{0}", str(root))))
    assert code == 2
    return [line for line in said.getvalue().splitlines() if "Loading weights" not in line]


def shown(name, said, root):
    """Return a mistake as the page shows it."""
    line = MISTAKES[name][0]
    for flags in (BEGINNINGS[command] for command in ("TRAIN", "DATA", "ANALYZE")):
        line = line.replace(flags.partition(" ")[2], "...")
    command = f"$ megasink {line}".rstrip().replace("{0}", "/data")
    return "\n".join(f"    {line}" for line in [command, *said]).replace(str(root), "/data")


def page(answers):
    """Return the page.

    Args:
        answers: {name: `shown`}.
    """
    sections = {}
    for name, text in answers.items():
        command = (MISTAKES[name][0] or "COMMAND").split()[0]
        sections.setdefault(command if command in COMMANDS else "COMMAND", []).append(text)
    return HEAD + "".join(
        f"\n## megasink {command}\n\n" + "\n\n".join(texts) + "\n"
        for command, texts in sections.items()
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        answers = {name: shown(name, answer(name, folder, main), folder) for name in MISTAKES}
    output = Path(sys.argv[1])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(answers))
