"""What stands over and behind a picture: where each mark is, and the number that is drawn there."""

import re
from io import BytesIO

import matplotlib.image
import numpy as np
import pytest

from megasink.analysis.pages import drawing, html
from megasink.analysis.pages.drawing import picture_of
from megasink.figures.recorded_panels import THINNED, bars, curve
from megasink.figures.style import BLUE, density, even_panels, heatmap, label, styled

TABLE = np.arange(12.0).reshape(3, 4)


@styled()
def drawn():
    figure, (left, middle, right) = even_panels(3, 3, 3.0)
    image = heatmap(left, TABLE, cmap="viridis")
    figure.colorbar(image, ax=left)
    label(left, "map", "layer", "head")
    middle.axhline(3.0)  # a guide, which is no data
    curve(middle, [0, 1, 2], [5.0, np.nan, 7.0], "o", "<run>", color=BLUE)
    curve(middle, np.arange(1000.0), np.linspace(0, 4, 1000), name="long")
    label(middle, "curves", "nats", "step")
    bars(right, [2.0, 4.0], ["none", "some"])
    density(right, [1.0, 3.0], [0.0, 0.5, 1.0], BLUE, "density")
    label(right, "bars", "share", "gate")
    return picture_of(figure, "a", "A picture", "Its caption")


def test_a_mark_stands_on_what_it_names():
    picture = drawn()
    pixels = matplotlib.image.imread(BytesIO(picture.files["png"]))[..., :3]
    height, width, _ = pixels.shape
    colors = matplotlib.colormaps["viridis"](TABLE / 11)[..., :3]
    found = 0
    for left, top, right, bottom, text in picture.numbers.marks:
        assert 0 <= left < right <= 1
        assert 0 <= top <= bottom <= 1
        pixel = pixels[int((top + bottom) / 2 * height), int((left + right) / 2 * width)]
        if cell := re.fullmatch(r"layer (\d), head (\d): (\d+)", text):
            row, column, value = map(int, cell.groups())
            assert TABLE[row, column] == value
            assert np.abs(pixel - colors[row, column]).max() < 0.02
            found += 1
        elif text.startswith("<run>"):
            blue = np.array([0x00, 0x72, 0xB2]) / 255
            assert np.abs(pixel - blue).max() < 0.02
            found += 1
    assert found == 12 + 2


def test_the_tables_hold_the_numbers_of_every_panel():
    of_map, curves, bars = drawn().numbers.tables
    assert of_map.head == ["layer, by head", "0", "1", "2", "3"]
    assert of_map.rows[1] == ["1", "4", "5", "6", "7"]
    assert curves.head == ["step", "<run>", "long"]
    assert curves.rows[0] == ["0", "5", "0"]
    assert ["2", "7", ""] in curves.rows  # of the long one every 25th
    assert len(curves.rows) == THINNED + 1
    assert bars.head[0] == "gate"
    assert ["some", "4", ""] in bars.rows
    assert ["0 to 0.5", "", "1"] in bars.rows


def test_a_page_escapes_them_and_says_when_they_are_too_many(monkeypatch):
    page = html.figure(drawn(), "alt", "caption")
    assert "&lt;run&gt;, step 2: 7</title>" in page
    assert "<run>" not in page
    assert page.count("<rect ") == page.count("<title>") == len(drawn().numbers.marks)
    monkeypatch.setattr(drawing, "MOST_CELLS", 11)
    page = html.figure(drawn(), "alt", "caption")
    assert "The page cannot hold more numbers" in page
    assert "layer, by head" not in page


def test_contents_are_the_headings():
    made = html.Page("title", "<heading>", 'of "this"')
    made.section("One", html.paragraph("text"))
    made.section("Two")
    made.subsection("Part of two")
    text = made.text()
    assert "<h1>&lt;heading&gt;</h1>" in text
    assert '<meta name="description" content="of &#34;this&#34;">' in text
    anchors = re.findall(r'href="#([^"]+)"', text)
    assert anchors == ["one", "two", "part-of-two"] == re.findall(r'<h[23] id="([^"]+)"', text)


@pytest.mark.parametrize("origin", ["upper", "lower"])
def test_rows_of_a_map_keep_their_numbers(origin):
    with styled():
        figure, (axis,) = even_panels(1, 1, 3.0)
        heatmap(axis, TABLE, origin=origin)
        picture = picture_of(figure, "a", "A", "")
    (table,) = picture.numbers.tables
    assert table.rows[2] == ["2", "8", "9", "10", "11"]
    tops = {text: top for _, top, _, _, text in picture.numbers.marks}
    above = tops["y 0, x 0: 0"] < tops["y 2, x 0: 8"]
    assert above == (origin == "upper")
