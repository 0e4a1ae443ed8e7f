"""The same random numbers for a test, or for a task of a worker, whatever ran before it."""

import os
import random
import sys


def seed() -> None:
    """Seed all generators that are loaded, by MEGASINK_TEST_SEED: with other numbers than 0 a
    tolerance is found that holds for some random numbers only."""
    number = int(os.environ.get("MEGASINK_TEST_SEED", "0"))
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)
