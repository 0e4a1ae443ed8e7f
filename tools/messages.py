"""Print what users read of the product: ``python tools/messages.py [FOLDER]``, a line each.

Four kinds, each with its place: the first line of a docstring; the text of an error or of a
printed line; the help of a flag (the string below a field of options, or `help=`); and every other
sentence, such as those of tables of reasons, of records, and of variables.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAID = {"UserError", "ConfigError", "print", "log", "warn", "warning", "error", "_plain", "add"}
DEFINED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SENTENCE = re.compile(r"[a-z]+,? [a-z]+,? [a-z]+")


def text_of(node: ast.AST) -> str:
    """Return a string as written, with {code} in the place of values; "" for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else text_of(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ""


def strings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) of everything that users or readers of the code see."""
    known = list(known_strings(tree))
    yield from known
    printed = " ".join(text for *_, text in known)
    passed: set[ast.AST] = set()  # parts of strings, and strings that are statements: docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Expr) and text_of(
            node.value if isinstance(node, ast.Expr) else node
        ):
            passed.update(part for part in ast.walk(node) if part is not node)
        if not isinstance(node, ast.expr) or node in passed:
            continue
        if (text := text_of(node)) not in printed and SENTENCE.search(text):
            yield node.lineno, "string", text


def known_strings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) of the three kinds that the place of a string shows."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINED) and (said := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), "docstring", said.splitlines()[0]
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    yield below.lineno, "help", text_of(below.value)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for part in node.args if name in SAID else ():
                yield part.lineno, "message", text_of(part)
            for word in node.keywords:
                if word.arg in ("help", "description"):
                    yield word.value.lineno, "help", text_of(word.value)
        elif isinstance(node, ast.Yield | ast.Return) and node.value is not None:
            yield node.lineno, "message", text_of(node.value)  # problems are yielded as strings


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1] if sys.argv[1:] else ROOT / "megasink").rglob("*.py")):
        for line, kind, text in sorted(strings(ast.parse(path.read_text(encoding="utf-8")))):
            if " " in text.strip():
                print(f"{path}:{line}\t{kind}\t{' '.join(text.split())}")
