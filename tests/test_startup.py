"""What is known from the command line and the file system is answered before anything slow is
imported: counted in modules, which no load of the machine changes."""

import json
import subprocess
import sys

from megasink.cli import COMMANDS

SLOW = "torch numpy scipy sklearn matplotlib pyarrow transformers tokenizers megatron safetensors"
# A tenth of a second each.
NOT_QUICK = f"{SLOW} pydantic psutil multiprocessing rich.progress"
# Command -> a line with paths that do not exist ({0} is a folder that is not empty).
PATHS = {
    "demo": "--train-iters 0",
    "data": "nowhere.txt --output {0}/new --train-tokenizer 500",
    "checkpoints": "nowhere",
    "train": "--run-dir {0} --num-layers 2",
    "recipes": "nowhere.toml",
    "plan": "--recipe nowhere.toml",
    "finetune": "nowhere --data nowhere.jsonl --output {0}/new",
    "generate": "nowhere --prompt a",
    "convert-to-hf": "nowhere --output {0}/new",
    "convert-from-hf": "nowhere --output {0}/new",
    "adopt": "nowhere {0}/new",
    "compare": "nowhere",
    "analyze": "nowhere --data nowhere.txt --output {0}/new",
    "ablate": "nowhere --data nowhere.txt --output {0}/new",
    "sweep": "nowhere --data nowhere.txt --output {0}/new",
    "evaluate": "nowhere --tasks piqa --output {0}/new",
    "report": "nowhere --output {0}/new",
    "doctor": "--head-dim 0",
}
# A run and a model that exist, and an output that holds something.
FULL = {"convert-to-hf": "{0}/run --output {0}", "convert-from-hf": "{0}/model --output {0}"}
PROGRAM = """
import json, sys
from megasink.cli import main
from megasink.training import preflight
preflight.start = None  # it takes seconds
lines, slow = json.loads(sys.argv[1]), set(sys.argv[2].split())
for line in lines:
    try:
        code = main(line)
    except SystemExit as stop:
        code = stop.code
    assert code == (0 if "--help" in line else 2), (line, code)
    if loaded := slow & set(sys.modules):
        sys.exit(f"{' '.join(line)}: imports {sorted(loaded)}")
print(len(lines), "lines")
"""


def answers(lines: list[list[str]], slow: str = SLOW) -> str:
    """What a process says that answers the lines, one after another, until one is slow."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines), slow],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    lines_of_error = done.stderr.strip().splitlines() or [""]
    return lines_of_error[-1] if done.returncode else done.stdout.strip().splitlines()[-1]


def test_help_and_refusals_import_nothing_slow(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "iter_0000001").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "run" / "config.json").write_text('{"arguments": {}}')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    lines = ["--help", *(f"{command} --help" for command in COMMANDS)]
    lines += [f"{command} {line or ''} --misspelt" for command, line in PATHS.items()]
    lines += [f"{command} {line}" for command, line in PATHS.items() if line is not None]
    found = [f"{command} {line}" for command, line in FULL.items()]
    assert set(PATHS) == set(COMMANDS)
    quick, given = (
        [line.replace("{0}", str(tmp_path)).split() for line in each] for each in (lines, found)
    )
    assert answers(quick, NOT_QUICK) == f"{len(quick)} lines"
    assert answers(given) == f"{len(given)} lines"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def test_a_slow_answer_is_found():
    """The counter counts, here a module that the answer needs."""
    line = ["report", "nowhere", "--output", "new"]
    found = answers([line], "torch megasink.cli.report")
    assert found == f"{' '.join(line)}: imports ['megasink.cli.report']"
