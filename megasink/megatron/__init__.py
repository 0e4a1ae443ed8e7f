"""megasink in any training loop of Megatron-Core: the layer spec and the head-balance loss.

Three lines in a loop that has a TransformerConfig (docs/megatron.md)::

    from megasink.megatron import HeadBalance, layer_spec

    balance = HeadBalance(config, attention_variant="sink", head_balance_coeff=1e-4)
    model = GPTModel(config, layer_spec(config), ...)
"""

from megasink.layers.head_balance import HeadBalance
from megasink.megatron.specs import layer_spec

__all__ = ["HeadBalance", "layer_spec"]
