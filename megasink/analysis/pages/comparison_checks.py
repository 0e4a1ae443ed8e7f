"""Check a comparison before it is drawn: names, measurements, and the files that it replaces."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

from megasink.console.printable import printable
from megasink.errors import UserError
from megasink.files.json_file import open_file
from megasink.files.output_folder import folder_problem

if TYPE_CHECKING:
    from megasink.analysis.analysis_object import Analysis

_OPTIONS = {
    "seq_length": "different sequence lengths (--seq-length)",
    "random_lengths": "different random lengths (--random-lengths)",
    "data": "different texts (--data)",
    "inputs": "different inputs (--inputs)",
    "bos": "different BOS settings (--bos)",
    "replaced_positions": "different replaced tokens (--replace-tokens-at)",
    "replaced_with": "different replacement tokens (--replace-tokens-with)",
    "max_samples": "different sample limits (--max-samples)",
}


def shortest_names(paths: Sequence[Path], what: str) -> list[str]:
    """Return the shortest path suffixes that distinguish the folders, printable."""
    resolved = [path.resolve() for path in paths]
    if twice := [path for path in resolved if resolved.count(path) > 1]:
        raise UserError(f"{what} is given twice ({twice[0]}): pass it once")
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return [printable(name) for name in names]


def name_apart(analyses: Sequence["Analysis"], folders: Sequence[Path]) -> None:
    """Add the folder to each name that several analyses have."""
    counts = Counter(analysis.name for analysis in analyses)
    for analysis, folder in zip(analyses, shortest_names(folders, "an analysis"), strict=True):
        if counts[analysis.name] > 1:
            analysis.name += f" ({folder})"


def differences(analyses: Sequence["Analysis"]) -> list[str]:
    """Return one phrase for each difference between analyses' samples; tokenizers may differ."""
    same_tokens = len({a.results.run.data_sha256 for a in analyses}) == 1
    sentences = []
    for key, what in _OPTIONS.items():
        values = [getattr(a.results.run, key) for a in analyses]
        values = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
        if key == "inputs":  # the other kinds stand apart
            values = [next(iter(a.results.run.inputs), "") for a in analyses]
        if len(set(values)) == 1 or (same_tokens and key != "seq_length"):
            continue
        named = ", ".join(f"{a.name}: {value}" for a, value in zip(analyses, values, strict=True))
        sentences.append(f"{what}: {named}; compare only numbers measured in the same way")
    counts = [a.results.samples for a in analyses]
    if not sentences and len(set(counts)) > 1:
        named = ", ".join(f"{a.name}: {n}" for a, n in zip(analyses, counts, strict=True))
        sentences.append(f"different numbers of samples: {named}")
    return sentences


def comment_of(output: Path, line: str, of: Sequence[object], *, overwrite: bool) -> str:
    """Return the comment that identifies a picture and its page; refuse to replace other files."""
    if output.suffix.lower() != ".png":
        raise UserError(f"--output {output}: the picture is a PNG, so name it {output.name}.png")
    if problem := folder_problem(output.parent):
        raise UserError(f"--output {output} {problem}")
    digest = hashlib.sha256(repr([*map(str, of)]).encode()).hexdigest()[:12]
    comment = f"megasink {line} ({digest})"
    for path in () if overwrite else (output, output.with_suffix(".html")):
        before = _comment_in(path) if path.exists() else comment
        if before != comment:
            what = "exists and was not written by megasink"
            if before.startswith("megasink "):
                what = f"was written by `{printable(before)[:200]}`"
            raise UserError(f"--output {path} {what}: choose another --output, or pass --overwrite")
    return comment


def _comment_in(path: Path) -> str:
    """Return the comment in a picture, or in the head of a page; empty without one."""
    from PIL import Image

    with suppress(OSError), open_file(path) as file, suppress(ValueError, SyntaxError):
        if path.suffix == ".html":
            head = file.read(10_000).decode(errors="replace")
            comment = re.search('<meta name="description" content="([^"]*)">', head)
            return unescape(comment[1]) if comment else ""
        with Image.open(file, formats=["PNG"]) as image:
            return str(image.info.get("Comment", ""))
    return ""
