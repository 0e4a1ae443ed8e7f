"""`megasink checkpoints`, and the rule that deletes checkpoints while a run trains."""

import re
import shutil
import threading

import pytest

from megasink.checkpoints.find import delete
from megasink.cli import main
from megasink.training.checkpoint_writer import delete_previous
from megasink.training.lease import Lease


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a run with checkpoints at 2, 4 and 6, and another one at 5."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.copytree(at(folder, 4), at(folder, 5))
    return folder


def at(folder, step):
    return folder / "checkpoints" / f"iter_{step:07d}"


def steps(folder):
    return [int(p.name[5:]) for p in sorted((folder / "checkpoints").glob("iter_???????"))]


def flip(checkpoint):
    shard = checkpoint / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x10
    shard.write_bytes(content)


def rows(text):
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines() if "step" not in line]


def test_what_is_there_and_what_a_resume_takes(run, capsys):
    (at(run, 6) / "metadata.json").unlink()
    at(run, 2).rename(at(run, 2).with_suffix(".damaged"))
    at(run, 4).rename(at(run, 4).with_suffix(".deleted"))  # as a kill leaves it
    assert main(["checkpoints", str(run)]) == 0
    out = capsys.readouterr().out
    found = {row[0]: row[1:] for row in rows(out)}
    assert [found[step][0] for step in "456"] == ["512", "640", "768"]  # 4 sequences of 32
    assert found["2"][-1] == "damaged: a resume moved it aside"
    assert found["4"][-1] == "damaged: its deletion was interrupted"
    assert found["5"][-1] == "intact; --resume auto uses it"
    assert "unfinished" in found["6"][-1]
    assert steps(run) == [5, 6]


def test_a_flipped_bit_is_found(run, capsys):
    flip(at(run, 6))
    assert main(["checkpoints", str(run)]) == 0
    assert "intact; --resume auto uses it" in capsys.readouterr().out
    assert main(["checkpoints", str(run), "--verify"]) == 2
    out, err = capsys.readouterr()
    assert "step 6: __0_0.distcp is damaged at or after byte" in err
    assert {row[0]: row[-1] for row in rows(out)}["5"] == "verified; --resume auto uses it"


def test_it_may_be_verified_while_it_trains(run, capsys):
    lease = Lease(run)
    assert main(["checkpoints", str(run), "--verify"]) == 0
    assert "a trainer (process " in capsys.readouterr().out
    lease.release()


def test_two_that_delete_at_once_and_one_that_was_killed(run):
    deleted = []
    threads = [
        threading.Thread(target=lambda: deleted.append(delete(at(run, 2)))) for _ in range(2)
    ]
    at(run, 4).rename(at(run, 4).with_suffix(".deleted"))  # as a kill leaves it
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(deleted) == [False, True]
    assert delete(at(run, 4).with_suffix(".deleted"))
    assert steps(run) == [5, 6]


@pytest.mark.parametrize("checksums", [False, True])
def test_the_one_before_a_damaged_checkpoint_is_not_deleted(run, capsys, checksums):
    def retain(step, *, ended=False):
        folder = str(run / "checkpoints")
        options = {"checksums": checksums, "has_ended": lambda: ended}
        delete_previous(folder, step, **options)
        return capsys.readouterr().out

    flip(at(run, 6))
    if not checksums:
        (at(run, 6) / "__0_0.distcp").unlink()
    assert "the checkpoint of step 6 is damaged" in retain(5)
    assert "keeping the checkpoint of step 6: none is newer" in retain(6)
    shutil.rmtree(at(run, 6))
    shutil.copytree(at(run, 2), at(run, 6))
    if checksums:
        assert "training has ended" in retain(5, ended=True)
    assert steps(run) == [2, 4, 5, 6]
    retain(5)
    assert steps(run) == [2, 4, 6]


def test_a_run_keeps_what_its_rule_keeps(train, tmp_path):
    train(tmp_path / "run", "--save-retain-interval", "4", "--verify-checkpoint")
    assert steps(tmp_path / "run") == [4, 6]
