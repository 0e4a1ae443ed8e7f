"""``python -m examples.replicate.grid FILE --output FOLDER``."""

from examples.replicate.entry import end_with
from examples.replicate.grid.command import main

if __name__ == "__main__":
    end_with(main, "grid")
