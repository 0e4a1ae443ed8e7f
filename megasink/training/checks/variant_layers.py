"""Checks of --attention-variant-layers."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants.gates import is_megatrons_output_gate
from megasink.attention.variants.layers import PLAIN, layers_with_variant
from megasink.training.checks.gates import with_shape

_FLAG = "--attention-variant-layers"


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. A word that fits has been replaced by its list."""
    layers = args.attention_variant_layers
    if layers is None:
        return
    yield from _misfit(args)
    if args.attention_variant == PLAIN:
        yield f"{_FLAG}: the other layers have --attention-variant {PLAIN} too: drop the flag"
    if args.hybrid_layer_pattern is not None:
        yield f"{_FLAG} with --hybrid-layer-pattern: all attention layers (*) have the variant"
    if args.match_ffn_width:
        yield f"{_FLAG} with --match-ffn-width, which counts a gate in every layer: drop it"
    shaped = args.hidden_size and args.num_attention_heads
    if shaped and "muon" in (args.optimizer or "") and is_megatrons_output_gate(with_shape(args)):
        yield (
            f"{_FLAG} with --optimizer {args.optimizer} and elementwise gates: Muon splits every "
            "linear_qkv alike: use --gate-granularity headwise or adam"
        )


def _misfit(args: Namespace) -> Iterator[str]:
    if not args.num_layers:
        return  # reported elsewhere
    layers = args.attention_variant_layers
    try:
        layers_with_variant(args)
    except ValueError as error:
        hint = "" if isinstance(layers, list) else " (--window-size, --window-attn-skip-freq)"
        yield f"{_FLAG} {str(layers).replace(' ', '')}: {error}{hint}"
