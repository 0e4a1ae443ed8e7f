"""The picture of head importance for TensorBoard and W&B."""

import numpy as np

from megasink.figures.importance_heatmap import importance_picture

# The ends of the colour map viridis, and the grey of layers without a gate.
CLOSED, OPEN, NONE = (0x44, 0x01, 0x54), (0xFD, 0xE7, 0x25), (204, 204, 204)


def share(picture, colour):
    """Of the pixels, those of a colour."""
    return float((np.abs(picture.astype(int) - colour).max(2) < 3).mean())


def test_open_and_closed_heads_and_layers_without_a_gate():
    importance_LH = np.ones((40, 20))
    importance_LH[:, :10] = 0.0
    importance_LH[:10] = np.nan
    picture = importance_picture(importance_LH, "a title")
    assert picture.dtype == np.uint8
    # The map is most of the picture: a quarter of its rows grey, the rest half and half.
    shares = [share(picture, colour) for colour in (CLOSED, OPEN, NONE)]
    np.testing.assert_allclose(np.array(shares) / sum(shares), [0.375, 0.375, 0.25], atol=0.02)
    assert sum(shares) > 0.6


def test_axes_title_and_numbers_are_there():
    """They are what differs from a picture of the same map without them."""
    small = importance_picture(np.full((4, 8), 0.95), "step 1")
    other = importance_picture(np.full((4, 8), 0.95), "step 2")
    assert small.shape == other.shape
    rows = np.unique(np.nonzero((small != other).any(2))[0])
    assert len(rows)
    assert rows.max() < small.shape[0] * 0.15  # the title alone, at the top
    ink = (small.max(2) < 60).mean(1)  # dark: numbers and labels
    assert ink[: small.shape[0] // 10].sum() > 0
    assert ink[-small.shape[0] // 8 :].sum() > 0


def test_a_model_without_any_gate_can_be_drawn():
    assert importance_picture(np.full((3, 4), np.nan), "none").size


def test_sizes_stay_within_a_page():
    for shape in ((1, 2), (160, 256)):
        height, width, _ = importance_picture(np.ones(shape), "x").shape
        assert 300 < height <= 1300
        assert 500 < width <= 1600
