"""megasink in any training loop of Megatron-Core: the specs and the head-balance loss.

Three lines in a loop that has a TransformerConfig (docs/megatron.md)::

    from megasink.megatron import HeadBalance, stack_spec

    HeadBalance(config, attention_variant="sink", head_balance_coeff=1e-4).install()
    model = HybridModel(config, stack_spec(config), ..., hybrid_layer_pattern="*-*-")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasink.megatron.head_balance import HeadBalance
    from megasink.megatron.hybrid_specs import stack_spec
    from megasink.megatron.specs import layer_spec

__all__ = ["HeadBalance", "layer_spec", "stack_spec"]


def __getattr__(name: str) -> Any:
    # When they are asked for: modules of this package are also imported before Megatron may be.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megasink.megatron import untried

    try:
        from megasink.megatron.head_balance import HeadBalance
        from megasink.megatron.specs import layer_spec

        names = {"HeadBalance": HeadBalance, "layer_spec": layer_spec}
        if name == "stack_spec":  # Megatron-Core 0.18 has no HybridModel
            from megasink.megatron.hybrid_specs import stack_spec

            names["stack_spec"] = stack_spec
    except ImportError as error:
        raise untried.lacking(error) from error
    untried.warn()
    # Megatron's import_module looks a spec up in the module's variables (spec_utils.py:56).
    globals().update(names)
    return globals()[name]
