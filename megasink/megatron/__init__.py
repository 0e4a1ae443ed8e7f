"""megasink in any training loop of Megatron-Core: the layer spec and the head-balance loss.

Three lines in a loop that has a TransformerConfig (docs/megatron.md)::

    from megasink.megatron import HeadBalance, layer_spec

    balance = HeadBalance(config, attention_variant="sink", head_balance_coeff=1e-4)
    model = GPTModel(config, layer_spec(config), ...)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasink.megatron.head_balance import HeadBalance
    from megasink.megatron.specs import layer_spec

__all__ = ["HeadBalance", "layer_spec"]


def __getattr__(name: str) -> Any:
    # When they are asked for: modules of this package are also imported before Megatron may be.
    if name == "HeadBalance":
        from megasink.megatron.head_balance import HeadBalance

        return HeadBalance
    if name == "layer_spec":
        from megasink.megatron.specs import layer_spec

        return layer_spec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
