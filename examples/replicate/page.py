"""Write results.md and its figures from the results files alone.

python examples/replicate/page.py            # after every change of a results file
python examples/replicate/page.py --judge    # first pass the verdicts again, on changed claims
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from examples.replicate.entry import end_with
    from examples.replicate.results_page import main

    end_with(main, "page.py")
