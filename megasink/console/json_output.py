"""``--json``: print one JSON object on stdout instead of text."""

import argparse
import json
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a command's parser."""
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON (docs/command-line.md)"
    )


def as_text(result: Any) -> str:
    """Return a dataclass or dict as JSON; NaN and infinity, which JSON lacks, are null."""
    from megasink.files.checked_fields import to_json  # imports pydantic, 0.1 s

    return json.dumps(to_json(result), indent=1, allow_nan=False)
