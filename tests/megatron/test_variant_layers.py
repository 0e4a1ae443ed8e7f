"""--attention-variant-layers: layers with the variant, and others with plain softmax attention.

Training equals autograd of the definitions in every layer, in one process and under every layout.
"""

import argparse
import re
from types import SimpleNamespace

import pytest

from megasink.attention.variants.variant_layers import layer_pattern, layers_with_variant
from megasink.training.parse_arguments import resolve_layers
from tests.distributed import merging
from tests.distributed.cases import CP, FULL, PP, SP, TOLERANCE, TP, TP_SP, TRAIN, VPP, name_of
from tests.distributed.layout import SINGLE
from tests.distributed.test_oracle import compare

# As in MiMo-V2-Flash: windows in most layers, sinks in those alone.
SINKS = {
    "num_layers": 4,
    "window_size": (7, 0),
    "window_attn_skip_freq": 2,
    "attention_variant_layers": "windowed",
}
HEADWISE = {"attention_variant": "gated", "attention_variant_layers": [0, 1]}
# Megatron's own layout, in which linear_qkv is wider in the layers that have a gate.
ELEMENTWISE = HEADWISE | {"gate_granularity": "elementwise"}


@pytest.mark.parametrize("options", [SINKS, HEADWISE, ELEMENTWISE], ids=name_of)
def test_training_equals_autograd(pool, options):
    compare(pool, SINGLE, 3, options)


@pytest.mark.parametrize(
    ("options", "layout", "how"),
    [
        (SINKS, VPP, FULL),
        (SINKS, CP, {}),
        (HEADWISE, TP_SP, SP),
        (ELEMENTWISE, TP, {"distributed_optimizer": True}),
        (ELEMENTWISE, PP, {}),
    ],
    ids=name_of,
)
def test_layout_changes_nothing(pool, options, layout, how):
    found = pool.run(TRAIN, layout, **options, **how)
    merging.assert_same_training(found, pool.once(TRAIN, SINGLE, **options), TOLERANCE)
    names = merging.whole([report["final"] for report in found])
    if options is SINKS:
        of_layer = [f"layers.{n}.self_attention.core_attention.softmax_offset" for n in range(4)]
        assert [any(name.endswith(end) for name in names) for end in of_layer] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("windowed", "windowed"),
        ("[1,0, 1]", [1, 0, 1]),
        ("([1]*2+[0])*2", [1, 1, 0, 1, 1, 0]),
        ("2*[1]+[0]", [1, 1, 0]),
    ],
)
def test_a_pattern_is_a_list_of_layers(text, wanted):
    assert layer_pattern(text) == wanted


@pytest.mark.parametrize(
    "text", ["sinks", "[1,2]", "[1]+1", "[1]*[1]", "[1]**9", "[1]*99999", "open('x')", "", "3"]
)
def test_nothing_else_is_a_pattern(text):
    with pytest.raises(ValueError, match=re.escape(text[:4])):
        layer_pattern(text)


def test_words_follow_the_windows():
    def of(pattern, skip, layers=4):
        options = SimpleNamespace(
            attention_variant_layers=pattern,
            num_layers=layers,
            window_size=(7, 0),
            window_attn_skip_freq=skip,
        )
        resolve_layers(options)
        return options.attention_variant_layers

    assert of("windowed", 3) == [1, 1, 0, 1]
    assert of("full", [0, 1, 1, 0]) == [1, 0, 0, 1]
    assert of([1, 0], 3) == [1, 0]  # the check says what is wrong
    assert of("full", None) == "full"
    assert of("full", [1]) == "full"
    with pytest.raises(ValueError, match="no layer is chosen"):
        layers_with_variant(
            argparse.Namespace(
                attention_variant_layers="full",
                num_layers=2,
                window_size=(7, 0),
                window_attn_skip_freq=None,
            )
        )
