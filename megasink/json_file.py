"""JSON objects that somebody else may have written, with one line for whatever is wrong."""

import json
from pathlib import Path
from typing import Any

from megasink.errors import UserError

_LARGEST = 1 << 30  # bytes: results.json of a model of a hundred layers has some 10 MB


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        UserError: it cannot be read, is no file, is not JSON, or holds something else.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file")
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path} has more than {_LARGEST:,} bytes: it is no such description")
        found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise UserError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a JSON {type(found).__name__}, not an object")
    return found
