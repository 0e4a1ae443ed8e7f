"""Tokens in any script: a font of the machine, or else the id; never a box."""

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.figure import Figure

from megasink.analysis.pages import map_figures as token_labels
from megasink.figures.style import panels, rendered, styled

TEXTS = ["plain", " a\n", "中文", "สวัสดี", "🙂", "\ufffd", "a token that is long"]


@pytest.fixture
def chinese(tmp_path):
    """A font of two characters, and none of other scripts."""
    builder = FontBuilder(1000, isTTF=True)
    names = [".notdef", "zhong", "wen"]
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord("中"): "zhong", ord("文"): "wen"})
    pen = TTGlyphPen(None)
    for move, place in (("moveTo", (0, 0)), *(("lineTo", p) for p in ((0, 900), (900, 0)))):
        getattr(pen, move)(place)
    pen.closePath()
    builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Megasink Test", "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=900, usWinAscent=900, usWinDescent=100)
    builder.setupPost()
    path = tmp_path / "chinese.ttf"
    builder.save(path)
    return path


@pytest.fixture(autouse=True)
def fonts(monkeypatch):
    """Those of matplotlib alone, whatever the machine has."""
    bundled = [f for f in font_manager.fontManager.ttflist if "matplotlib" in f.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", bundled)
    for cached in (token_labels._others, token_labels._characters):
        cached.cache_clear()
    font_manager.fontManager._findfont_cached.cache_clear()
    yield
    for cached in (token_labels._others, token_labels._characters):
        cached.cache_clear()
    font_manager.fontManager._findfont_cached.cache_clear()


def test_what_no_font_has_is_the_tokens_id():
    labels, fonts = token_labels.token_labels(TEXTS, list(range(10, 17)))
    assert labels == ["plain", "␣a↵", "#12", "#13", "#14", "#15", "a␣token␣that…"]
    assert fonts[0] == token_labels.FONT
    assert token_labels.token_labels(["中"], None)[0] == ["▯"]  # of an older analysis


def test_a_font_of_the_machine_is_used(chinese, recwarn):
    font_manager.fontManager.addfont(chinese)
    token_labels._others.cache_clear()
    labels, fonts = token_labels.token_labels(TEXTS, list(range(10, 17)))
    assert labels == ["plain", "␣a↵", "中文", "#13", "#14", "#15", "a␣token␣that…"]
    assert "Megasink Test" in fonts
    pictures = []
    for label in ("中", "文中", "#12"):
        with styled():
            figure, ((axis,),) = panels(1, 1, 1.0, width=1.0)
            axis.set_yticks([0], [label], family=fonts)
            pictures.append(np.frombuffer(rendered(figure), np.uint8).tobytes())
    assert len(set(pictures)) == 3
    assert not [w for w in recwarn if "missing from" in str(w.message)]


def test_the_ticks_of_a_map_are_the_sink_and_keys_from_0():
    axis = Figure().subplots()
    token_labels.draw_map(axis, np.full((8, 9), 1 / 9), has_sink=True)
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert labels[:2] == ["\nsink", "0"]
    assert [float(label) for label in labels[1:]] == list(axis.get_xticks()[1:])
    assert axis.get_xticks()[0] < -0.5
