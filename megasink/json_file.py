"""Reading of untrusted JSON, with a one-line error for any problem."""

import json
from pathlib import Path
from typing import Any

from megasink.errors import UserError

_KINDS = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
_KINDS |= {int: "number", float: "number"}
_LARGEST = 1 << 30  # bytes; results.json of a 100-layer model is about 10 MB


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    value = read_value(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {kind_of(value)}, not an object")
    return value


def kind_of(value: Any) -> str:
    """Return what JSON calls a value, whose writer need not know Python; parquet has more types."""
    return _KINDS.get(type(value), type(value).__name__)


def read_value(path: Path) -> Any:
    """Return the JSON value in a file."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file")
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path} has more than {_LARGEST:,} bytes: too large to be read")
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise UserError(f"{path} is not readable JSON: it is nested too deeply") from None
