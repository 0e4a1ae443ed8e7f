"""Run an experiment: data, runs, measurements, verdicts, results/NAME-FORM.json.

    python examples/replicate/run.py a --form fast --output runs/replicate
    python examples/replicate/page.py

The fast form takes less than 5 minutes on two cores, the full form less than 8 hours. A killed
command goes on where it was. Experiments that use the runs of another find them beside their own
output: run that one first, with the same --output and --form.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from examples.replicate.entry import end_with
    from examples.replicate.runner import main

    end_with(main, "run.py")
