"""Some of the damaged inputs of every kind; `python -m tests.damage --large` takes all of them."""

from tests.damage.tables import CASES
from tests.forkserver import HANG_SECONDS, server

CHOSEN = """
corpus/json-many-keys corpus/kernel-memory corpus/name-in-summary corpus/sparse-text
data/bin-is-a-pipe data/id-between data/sidecar-deep
run/shards-garbage/generate run/metadata-code/generate run/tracker-huge/generate
run/config-deep/generate run/metrics-bytes/compare
going-on/points-x.json-cut/ablate going-on/field-0/report going-on/partial-shard_x.npz-half/analyze
folder/weights-offsets/convert folder/config-pipe/analyze
""".split()
FIELDS = [name for name in CASES if name.startswith("field/")]
FUZZ = [name for name in CASES if name.startswith("fuzz/")]


def judged(names):
    result = server().run(["tests.damage", *names], timeout=3 * HANG_SECONDS)  # of hundreds
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_damage_is_one_line_and_nothing_is_left_or_lost():
    names = [*CHOSEN, *FIELDS[::193], *FUZZ[::193]]
    number = sum(name.startswith(tuple(names)) for name in CASES)
    assert f"{number} damaged inputs: " in judged(names)


def test_every_damaged_field_is_one_line():
    """None is taken that its kind does not have: `tests/damage/fields.py:KINDS`."""
    assert len(FIELDS) > 390
    judged(["field/"])


def test_every_damaged_file_that_a_command_goes_on_from_is_one_line():
    judged(["going-on/"])


def test_every_crafted_file_is_one_line():
    """Of every kind that commands read."""
    assert len(FUZZ) >= 400
    judged(["fuzz/"])


def test_the_tables_hold_a_hundred():
    assert len(CASES) >= 100
    assert set(CHOSEN) <= set(CASES)
