"""Tasks for the workers: what other stacks do to a config."""

import copy
import pickle
from typing import Any


def config_of_a_host() -> dict[str, Any]:
    """What stands in a config after a host has set, copied and saved it."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.utils import get_model_config

    from megasink.megatron import HeadBalance

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0
    )
    balance = HeadBalance(config, attention_variant="sink")
    called: list[Any] = []
    balance.reduce = lambda: called.append("reduce")  # type: ignore[method-assign]
    # As Megatron-Bridge (training/setup.py:577) and slime do, after the model was built.
    config.finalize_model_grads_func = lambda *args: called.append(args)
    config.finalize_model_grads_func(["model"], 3)
    config.finalize_model_grads_func = None  # a function of a test cannot be pickled
    copied, pickled = copy.deepcopy(config), pickle.loads(pickle.dumps(config))
    return {
        "called": called,
        "is one": isinstance(config, TransformerConfig),
        "named": (type(config).__module__, type(config).__qualname__),
        "copies": [type(one) is TransformerConfig for one in (copied, pickled)],
        "copy shares": copied.statistics is balance,
        "pickled options": pickled.attention_variant,
        "found": get_model_config(type("Model", (), {"config": config})()) is config,
    }
