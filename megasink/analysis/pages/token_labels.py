"""Labels of tokens in any script, in the machine's fonts; otherwise the token's id."""

from collections.abc import Sequence
from functools import cache
from typing import Any

FONT = "DejaVu Sans Mono"  # comes with matplotlib
_MARKS = str.maketrans({"\n": "↵", "\t": "→", "\r": "↵", " ": "␣"})
_MOST = 14
_PART = "\ufffd"  # a token that is part of a character


def token_labels(texts: Sequence[str], ids: Any) -> tuple[list[str], list[str]]:
    """Return a label for each token, #ID for one that no font draws, and the fonts to use."""
    fonts, labels = [FONT], []
    for number, text in enumerate(texts):
        text = text.translate(_MARKS)
        label = text if len(text) <= _MOST else f"{text[: _MOST - 2]}…"
        missing = {ord(c) for c in label} - _characters(FONT)
        candidates = [font for font in fonts[1:] if missing <= _characters(font)]
        candidates = candidates or [font for font in _others() if missing <= _characters(font)]
        if missing and candidates and candidates[0] not in fonts:
            fonts.append(candidates[0])
        if _PART in label or (missing and not candidates):
            label = "▯" if ids is None else f"#{ids[number]}"
        labels.append(label)
    return labels, fonts


@cache
def _others() -> tuple[str, ...]:
    """Return the names of the machine's other fonts, except those that draw only boxes."""
    from matplotlib import font_manager

    names = sorted({font.name for font in font_manager.fontManager.ttflist})
    return tuple(name for name in names if "Last Resort" not in name and name != FONT)


@cache
def _characters(font: str) -> frozenset[int]:
    """Return the characters for which a font has outlines; emoji may be pictures."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    try:
        file: Any = get_font(findfont(FontProperties(family=font), fallback_to_default=False))
        return frozenset(file.get_charmap()) if file.scalable else frozenset()
    except (OSError, RuntimeError, ValueError):  # a font that cannot be read
        return frozenset()
