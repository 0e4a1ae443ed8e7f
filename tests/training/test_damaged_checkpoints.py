"""A checkpoint that is damaged is passed over, and every damage is seen."""

import random
import shutil

import pytest

from megasink.checkpoints.damage import damage, move_aside, newest_intact
from tests.training.six_steps import losses, resumed_from


@pytest.mark.parametrize("harm", ["truncated shard", "missing shard", "flipped bit", "no index"])
def test_a_damaged_checkpoint_is_passed_over(train, finished, tmp_path, harm):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    newest = run / "checkpoints" / "iter_0000006"
    shard = newest / "__0_0.distcp"
    content = shard.read_bytes()
    if harm == "truncated shard":
        shard.write_bytes(content[: len(content) // 2])
    elif harm == "missing shard":
        shard.unlink()
    elif harm == "no index":
        (newest / ".metadata").write_bytes((newest / ".metadata").read_bytes()[:100])
    else:
        shard.write_bytes(_flipped(content, 0.5))
    before = losses(run)
    flags = ["--verify-checkpoint"] if harm == "flipped bit" else []
    if harm in ("truncated shard", "flipped bit"):  # the others differ in the reason alone
        train(run, "--resume", *flags)
        assert resumed_from(run) == 4
        assert losses(run) == before
        assert (run / "checkpoints" / "iter_0000006.damaged").is_dir()
    else:
        assert newest_intact(run / "checkpoints")[0] == 4


def test_every_flipped_bit_in_a_tensor_is_found(finished, tmp_path):
    checkpoint = tmp_path / "iter_0000006"
    shutil.copytree(finished / "checkpoints" / "iter_0000006", checkpoint)
    assert damage(checkpoint, checksums=True) is None
    shard = checkpoint / "__0_0.distcp"
    content = shard.read_bytes()
    generator = random.Random(0)
    found = 0
    for _ in range(20):
        shard.write_bytes(_flipped(content, generator.random()))
        found += damage(checkpoint, checksums=True) is not None
    # The zip format pads between its records: a bit there belongs to no tensor.
    assert found >= 18


def test_no_whole_checkpoint_is_said(train, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for index in run.glob("checkpoints/*/.metadata"):
        index.unlink()
    with pytest.raises(Exception, match=r"no checkpoint in .* is intact \(step 6: .*step 2: "):
        train(run, "--resume")
    assert len(list(run.glob("checkpoints/iter_*"))) == 3  # nothing was moved


def _flipped(content: bytes, where: float) -> bytes:
    changed = bytearray(content)
    changed[int(where * len(content))] ^= 0x10
    return bytes(changed)


def test_the_newest_two_that_were_moved_aside_stay(tmp_path, capsys):
    """And nothing else goes, whatever its name is like."""
    others = ("iter_0000001.damaged.txt", "iter_0000001.damage", "iter_x.damaged", "iter_0000009")
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "iter_0000002.damaged9").symlink_to("elsewhere")
    for turn, step in enumerate((5, 3, 3, 8)):
        folder = tmp_path / f"iter_{step:07d}"
        folder.mkdir()
        (folder / "turn").write_text(f"{turn}")
        move_aside(tmp_path, step, "its index is cut")
    aside = {path.name: (path / "turn") for path in tmp_path.glob("iter_*.damaged*")}
    turns = {name: path.read_text() for name, path in aside.items() if path.is_file()}
    assert sorted(turns.values()) == ["2", "3"]
    assert capsys.readouterr().out.count("the newest 2 damaged checkpoints are kept") == 2
    assert {*others, "elsewhere", "iter_0000002.damaged9"} <= {p.name for p in tmp_path.iterdir()}
