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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megasink.megatron import untried

    try:
        from megasink.megatron.head_balance import HeadBalance
        from megasink.megatron.specs import layer_spec
    except ImportError as error:
        raise untried.lacking(error) from error
    untried.warn()
    # Megatron's import_module looks a spec up in the module's variables (spec_utils.py:56).
    globals().update(HeadBalance=HeadBalance, layer_spec=layer_spec)
    return globals()[name]
