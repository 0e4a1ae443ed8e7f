"""A checkpoint that somebody else made runs no code, whatever reads it.

Each crafted one leaves a mark when upstream's own readers take it (the control), and none in any
command. Genuine runs resume as before: tests/distributed/test_resume.py. Not covered: states of
FP8 on a machine with TransformerEngine (its module is imitated).
"""

import pickle
import shutil
from pathlib import Path

import pytest

from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import train_tokenizer
from tests.distributed.layout import SINGLE
from tests.distributed.pool import free_port
from tests.runs import MOCK, TINY
from tests.security.crafted import ENTRIES, Mark

TASKS = "tests.security.tasks"
FLAGS = [*TINY, *MOCK]
FLAGS += """
    --hidden-size 48 --max-position-embeddings 64 --train-iters 2 --lr 1e-2 --vocab-size 400
    --lr-decay-style constant --eval-iters 0 --save-interval 100 --num-workers 0
""".split()
READ_BY_ENTRY = ["index", "file", "common.pt", "optimizer", *ENTRIES]
PLACES = [*READ_BY_ENTRY, "tensor"]
# What reads the weights of a run: with a pickle beside them and with one as their index.
READING = (
    "generate RUN --prompt import --max-new-tokens 2 --tokenizer TOKENIZER --device cpu",
    "convert-to-hf RUN --output OUT/hf --tokenizer TOKENIZER --no-verify",
    "sweep RUN --output OUT/sweep --data DATA --lengths 16 --max-samples 1 --tokenizer TOKENIZER",
    "compare RUN --output OUT/compare.png",
)
REFUSING = (
    *READING[:3],
    "analyze RUN --output OUT/analysis --data DATA --tokenizer TOKENIZER",
    "analyze RUN --checkpoints --output OUT/trace --data DATA --tokenizer TOKENIZER",
)


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """Genuine runs of two steps, in both formats."""
    folder = tmp_path_factory.mktemp("genuine")
    lines = [
        [*FLAGS, "--run-dir", str(folder / name), "--ckpt-format", name]
        for name in ("torch_dist", "torch")
    ]
    (answers, _) = pool.run(f"{TASKS}:refusals", command_lines=lines, port=free_port())
    assert answers == [None, None]
    return folder / "torch_dist", folder / "torch"


@pytest.fixture(scope="module")
def crafted(pool, runs, tmp_path_factory):
    """{place: folder of a checkpoint that asks for a mark there}, and where the marks would be."""
    copies = tmp_path_factory.mktemp("crafted")
    (copies / "marks").mkdir()
    found = {}
    for run, places in zip(runs, (PLACES, ["old format"]), strict=True):
        options = {"run": str(run), "copies": str(copies), "places": places}
        found |= pool.run(f"{TASKS}:craft_all", SINGLE, **options)[0]
    return found, copies / "marks"


def test_every_entry_is_read_without_its_code(pool, runs, crafted):
    checkpoints, marks = crafted
    said = {}
    read = {place: folder for place, folder in checkpoints.items() if place in READ_BY_ENTRY}
    genuine = max((runs[0] / "checkpoints").glob("iter_*"))
    folders = [str(genuine), *read.values()]
    (answers,) = pool.run(f"{TASKS}:read", SINGLE, checkpoints=folders)
    assert answers.pop(0) == "read Namespace"
    said = dict(zip(read, answers, strict=True))
    assert "elsewhere" in said.pop("file")
    for place, answer in said.items():
        assert "is broken or untrusted: it refers to the code posix.mkdir" in answer, place
        assert checkpoints[place] in answer
        assert "\n" not in answer
    assert "its entry rng_state/" in said["random states"]
    assert list(marks.iterdir()) == []


def test_training_refuses_them_in_one_line(pool, crafted, tmp_path):
    checkpoints, marks = crafted
    how = {
        "index": "--resume",
        "random states": "--resume",
        "tensor": "--resume",
        "common state": "--load",
        "extra state": "--finetune --load",
        "optimizer": "--pretrained-checkpoint",
        "old format": "--ckpt-format torch --load",
    }
    commands = []
    for place, flags in how.items():
        folder = Path(checkpoints[place]).parent
        resumed = "--resume" in flags
        run_dir = folder.parent if resumed else tmp_path / place
        more = flags.split() + ([] if resumed else [str(folder)])
        commands.append([*FLAGS, "--run-dir", str(run_dir), *more])
    answers, _ = pool.run(f"{TASKS}:refusals", command_lines=commands, port=free_port())
    for command, answer in zip(commands, answers, strict=True):
        assert answer is not None, command
        assert "untrusted" in answer
        assert "the code posix.mkdir" in answer
        assert "\n" not in answer
    assert list(marks.iterdir()) == []


def test_commands_that_read_models_run_nothing(pool, crafted, tmp_path):
    """They take tensors alone, so that only the index can be in their way."""
    checkpoints, marks = crafted
    source = Path(pickle.__file__)
    train_tokenizer([Document(source.read_text(), "test")], 400, tmp_path / "tokenizer")

    def answers(lines, place):
        (tmp_path / place).mkdir()
        words = {"RUN": Path(checkpoints[place]).parents[1], "OUT": tmp_path / place}
        words |= {"TOKENIZER": tmp_path / "tokenizer", "DATA": source.with_suffix(".txt")}
        commands = []
        for line in lines:
            command = line.split(" ")
            for word, value in words.items():
                command = [part.replace(word, str(value)) for part in command]
            commands.append(command)
        task = "tests.training.generate_tasks:megasink"
        return zip(lines, pool.run(task, SINGLE, commands=commands)[0], strict=True)

    source = Path(shutil.copy(source, tmp_path / "text.txt"))
    for line, (code, _, errors) in answers(READING, "common state"):
        assert code == 0, (line, errors)
    for line, (code, _, errors) in answers(REFUSING, "index"):
        assert code == 2, line
        assert "untrusted: it refers to the code posix.mkdir" in errors
        assert errors.count("\n") == 1
    assert list(marks.iterdir()) == []


def test_upstreams_readers_execute_what_is_crafted(pool, crafted):
    """The control, last: each would leave its mark."""
    checkpoints, marks = crafted
    executed = {p: c for p, c in checkpoints.items() if p not in ("file", "tensor")}
    pool.run(f"{TASKS}:read_upstream", SINGLE, checkpoints=executed)
    assert {path.name for path in marks.iterdir()} == set(executed)


def test_classes_of_a_fork_stand_in_among_the_arguments_alone(pool, tmp_path):
    (answers,) = pool.run(f"{TASKS}:load_classes_of_a_fork", SINGLE, folder=str(tmp_path))
    arguments, *refused = answers
    assert arguments == (3, False)
    assert "elsewhere.pt is broken or untrusted: it refers to the code company." in refused[0]
    assert "both.pt is broken or untrusted: it refers to" in refused[1]
    assert not (tmp_path / "mark").exists()


def test_states_of_fp8_are_not_unpickled(pool, tmp_path):
    (said,) = pool.run(f"{TASKS}:load_state_of_fp8", SINGLE, mark=str(tmp_path / "mark"))
    assert "an FP8 state is broken or untrusted" in said
    assert not (tmp_path / "mark").exists()


def test_a_run_with_delayed_scaling_can_be_resumed(pool):
    """TransformerEngine 2.20 refuses its states, which our loader reads without running code."""
    assert pool.run(f"{TASKS}:load_state_of_delayed_scaling", SINGLE) == [[True, False]]


def test_indices_of_data_sets_are_no_pickles(pool, tmp_path):
    """Upstream's own care, which is what keeps a crafted cache beside a data set harmless."""
    path = tmp_path / "shuffle_index.npy"
    path.write_bytes(pickle.dumps(Mark(tmp_path / "mark")))
    (said,) = pool.run(f"{TASKS}:load_index", SINGLE, path=str(path))
    assert "posix.mkdir" in said or "as a pickle" in said
    assert not (tmp_path / "mark").exists()
