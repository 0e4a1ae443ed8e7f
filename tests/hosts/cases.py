"""All cases, by name."""

from tests.hosts.differences import DATA, FLAGS, FOLDERS, SOFTWARE
from tests.hosts.faults import DEATHS, MEETING, TRAINS

CASES = {**FOLDERS, **DATA, **FLAGS, **SOFTWARE, **MEETING, **DEATHS, **TRAINS}
FEW = (
    "rank 0 SIGKILL",
    "checkpoints on a volume of B",
    "one byte of the .bin, without a .json",
    "copies of data and tokenizer at other paths",
    "a clock 40 s ahead",
)
"""Those that pytest runs; `python -m tests.hosts` runs all."""
