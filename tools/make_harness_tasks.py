"""Make the items of megasink's own evaluation tasks from the docstrings of Python's library.

python tools/make_harness_tasks.py [FOLDER]: writes docstrings_*.json; the same Python version
gives the same files.
"""

import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "megasink" / "analysis" / "evaluate" / "tasks"
ITEMS, TEXTS, SEED = 300, 60, 1234
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
# A plain sentence: no code, tables or examples.
_SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'()\-]{38,158}\.")


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (module, docstring) of the library, each docstring once."""
    library, seen = Path(sysconfig.get_path("stdlib")), set()
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if _LEFT_OUT & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and text.isascii() and text not in seen:
                seen.add(text)
                yield ".".join(parts), text


def pairs() -> Iterator[tuple[str, str, str]]:
    """Yield (module, sentence, the sentence after it) out of one paragraph, one per docstring."""
    for module, text in docstrings():
        for paragraph in text.split("\n\n"):
            sentences = re.split(r"(?<=\.)\s+", " ".join(paragraph.split()))
            both = [s for s in sentences[:2] if _SENTENCE.fullmatch(s)]
            if len(both) == 2:
                yield module, both[0], both[1]
                break


def choice_items() -> list[dict[str, object]]:
    """Four sentences, of which one follows; the others follow elsewhere, and are of its length."""
    draw, found = random.Random(SEED), sorted(set(pairs()))
    items: list[dict[str, object]] = []
    for module, context, answer in draw.sample(found, ITEMS):
        others = sorted(
            {follows for other, _, follows in found if other != module and follows != answer},
            key=lambda text: (abs(len(text) - len(answer)), text),
        )
        choices = [answer, *draw.sample(others[:24], 3)]
        draw.shuffle(choices)
        items.append({"context": context, "choices": choices, "answer": choices.index(answer)})
    return items


def texts() -> list[dict[str, str]]:
    """Whole docstrings of 300 to 1500 characters."""
    found = sorted({text for _, text in docstrings() if 300 <= len(text) <= 1500})
    return [{"text": text} for text in random.Random(SEED).sample(found, TEXTS)]


def main() -> None:
    """Write both files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    made = {"choice": choice_items(), "perplexity": texts()}
    for name, items in made.items():
        lines = ",\n".join(json.dumps(item) for item in items)
        (folder / f"docstrings_{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
