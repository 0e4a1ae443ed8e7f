"""Check types and ranges of JSON values and of public functions' arguments with pydantic.

Strict: "4" is not a number and true is not a count.
"""

import functools
import inspect
import json
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import to_jsonable_python

from megasink.errors import UserError

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Experts = Annotated[int, Field(ge=0, le=100_000)]
Positive = Annotated[float, Field(gt=0, le=1e18)]
Number = Annotated[float, Field(ge=-1e18, le=1e18)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]

_adapter: Any = functools.cache(TypeAdapter)
_PLAIN = {int, float, bool, str, Path, types.NoneType}


def checked[F: Callable[..., Any]](function: F) -> F:
    """Make a public function raise UserError for an argument whose plain type is wrong."""
    signature = inspect.signature(function)
    kinds = {n: p.annotation for n, p in signature.parameters.items() if _is_plain(p.annotation)}
    name = function.__qualname__.removesuffix(".__init__")

    @functools.cache
    def record() -> type[BaseModel]:
        return fields(kinds, finite=False)  # the function checks ranges

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # names the missing or unknown argument
        given = {key: bound.arguments[key] for key in kinds if key in bound.arguments}
        # Numbers of numpy and torch become Python's.
        given = {k: v.item() if getattr(v, "shape", None) == () else v for k, v in given.items()}
        check(record(), given, name)
        bound.arguments |= given
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def _is_plain(kind: Any) -> bool:
    joined = get_origin(kind) in (tuple, types.UnionType)
    return kind in _PLAIN or (joined and all(map(_is_plain, get_args(kind))))


def fields(kinds: Mapping[str, Any], *, finite: bool = True) -> type[BaseModel]:
    """Return the record of optional fields with these types."""
    with_default: dict[str, Any] = {key: (kind, None) for key, kind in kinds.items()}
    config = ConfigDict(strict=True, extra="allow", allow_inf_nan=not finite)
    return create_model("Record", __config__=config, **with_default)


def check(kind: type[BaseModel], value: Mapping[str, Any], where: str) -> None:
    """Raise UserError for the first field of a wrong type or range, and list the other ones."""
    with _refusing(value, where):
        kind.model_validate(dict(value))


def from_json[T](kind: type[T], value: Any, where: str) -> T:
    """Build a dataclass from a JSON value that has its fields and no others."""
    with _refusing(value, where):
        adapter: TypeAdapter[T] = _adapter(kind)
        # Names of files need not be UTF-8, but JSON is.
        text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        return adapter.validate_json(text, strict=True, extra="forbid")


def to_json(value: Any) -> Any:
    """Return a value as dicts, lists and plain values; NaN and infinity become null."""
    return to_jsonable_python(value, inf_nan_mode="null", fallback=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


@contextmanager
def _refusing(value: Any, where: str) -> Iterator[None]:
    """Turn pydantic's error about a JSON value into one line."""
    try:
        yield
    except ValidationError as error:
        entries = error.errors(include_url=False)
        first, key = entries[0], _key(value, entries[0])
        others = sorted({_key(value, entry) for entry in entries} - {key})
        # Of a union, one entry a member.
        allowed = dict.fromkeys(e["msg"] for e in entries if _key(value, e) == key)
        rules = " or ".join(allowed).replace(" or Input should be", " or")
        more = f" (also wrong: {', '.join(others)})" if others else ""
        wrong = f"{key or 'it'} is {first['input']!r:.60}: {rules[0].lower()}{rules[1:]}"
        if first["type"] in _KEYS:
            wrong = f"it has {_KEYS[first['type']]} {key}"
        raise UserError(f"{where}: {wrong}{more}") from error


_KEYS = {"missing": "no", "unexpected_keyword_argument": "the unknown key"}


def _key(value: Any, entry: Any) -> str:
    """Return the place of an error in a JSON value, without pydantic's names of types."""
    words, place = [], entry["loc"]
    for part in place:
        of_list = isinstance(value, list) and isinstance(part, int)
        if of_list or (isinstance(value, dict) and part in value):
            value = value[part]
            words.append(str(part))
    return ".".join([*words, str(place[-1])] if entry["type"] == "missing" else words)
