"""Integer arithmetic of bash, without variables, by Python's parser."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

_LARGEST, _MOST_BITS = 1 << 62, 62
_SIGNS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Pow: lambda a, b: a ** range(_MOST_BITS)[b], ast.BitAnd: operator.and_,
    ast.LShift: lambda a, b: a << range(_MOST_BITS)[b], ast.RShift: operator.rshift,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.Invert: operator.invert,
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Lt: operator.lt, ast.Gt: operator.gt, ast.LtE: operator.le,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_PYTHON = (
    (r"\b(\d+)#(\w+)", lambda found: str(int(found[2], int(found[1])))),
    (r"\b0(\d+)\b", r"0o\1"),
    (r"&&", " and "),
    (r"\|\|", " or "),
    (r"!(?!=)\s*(\w+|\([^()]*\))", r"(not \1)"),
    (r"\((.+)\?(.+):(.+)\)", r"((\2) if (\1) else (\3))"),
)


def evaluated(text: str) -> int | None:
    """Return the value of an expression; None for what Python's parser cannot take."""
    text = f"({text.strip() or 0})"
    try:
        for shell, python in _PYTHON:
            text = re.sub(shell, python, text)
        number = int(_of(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, KeyError, IndexError, ArithmeticError, RecursionError):
        return None
    return number if abs(number) < _LARGEST else None


def _of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=op, operand=inner):
            return _SIGNS[type(op)](_of(inner))
        case ast.BinOp(left=left, op=op, right=right):
            return _SIGNS[type(op)](_of(left), _of(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _SIGNS[type(op)](_of(left), _of(right))
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)([_of(value) for value in values])
        case ast.IfExp(test=test, body=body, orelse=other):
            return _of(body if _of(test) else other)
    raise ValueError(ast.dump(node))
