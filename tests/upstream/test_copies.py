"""Without upstream's copies the values are the same to the bit."""

import numpy as np
import pytest

from tests.distributed.layout import SINGLE

TASKS = "tests.upstream.copies_tasks"


@pytest.mark.parametrize("task", ["rotations", "clipped"])
def test_the_values_are_upstreams(pool, task):
    for name, (mine, theirs) in pool.run(f"{TASKS}:{task}", SINGLE)[0].items():
        for found, wanted in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=name)


def test_the_patches_save_copies(pool):
    """Also: they are in use on the CPU platform, which has neither TransformerEngine nor apex."""
    saved = pool.run(f"{TASKS}:saved", SINGLE)[0]
    assert saved == {"rotated forward": 1, "rotated backward": 2, "clipped": 3}
