"""Tasks for the workers: what other stacks do to a config."""

import copy
import pickle
from dataclasses import asdict, fields
from typing import Any


def config_of_a_host() -> dict[str, Any]:
    """What stands in a config after a host has set, copied and saved it."""
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.utils import get_model_config

    from megasink.megatron import HeadBalance

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0
    )
    kind, fields_before = type(config), dict(vars(config))
    balance = HeadBalance(config, attention_variant="sink", head_balance_coeff=1.0)
    changed = {n for n, value in fields_before.items() if getattr(config, n) is not value}
    balance.install()
    called: list[Any] = []
    balance.reduce = lambda: called.append("reduce")  # type: ignore[method-assign]
    model = _stage(config)
    left_out = config.finalize_model_grads_func
    # As Megatron-Bridge (training/setup.py:577) and slime do, after the model was built.
    config.finalize_model_grads_func = lambda *args: called.append(args[1:])
    # The schedule calls it for every microbatch, before it calls that function.
    config.experimental_attention_variant_loss_scale_func(torch.ones(1))
    config.finalize_model_grads_func([model], 3)
    # A model of its own, by a config of the same fields, reduces nothing of this one.
    other = TransformerConfig(**{f.name: getattr(config, f.name) for f in fields(config)})
    other.finalize_model_grads_func([_stage(other)], 4)
    as_dict = asdict(config)["finalize_model_grads_func"]
    return {
        "left out": left_out,
        "called": called,
        "changed": changed,
        "kept its class": type(config) is kind,
        "as dict": callable(as_dict),
        "copy shares": copy.deepcopy(config).statistics is balance,
        "found": get_model_config(model) is config,
    }


def saved_config() -> dict[str, str]:
    """A config as a stack saves it: its own, and with a HeadBalance before and after install()."""
    import torch
    import yaml
    from megatron.core.transformer import TransformerConfig
    from megatron.training.config.container import ConfigContainerBase
    from megatron.training.config.yaml_utils import safe_yaml_representers

    from megasink.megatron import HeadBalance

    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "attention_dropout": 0.0}
    found = {}
    for name in ("own", "attached", "installed"):
        config = TransformerConfig(**shape, softmax_type="learnable")
        config.finalize_model_grads_func = torch.is_tensor  # in the place of the host's
        if name != "own":
            balance = HeadBalance(config, attention_variant="sink", head_balance_coeff=1.0)
        if name == "installed":
            balance.install()
            assert config.finalize_model_grads_func is not torch.is_tensor
        with safe_yaml_representers():
            found[name] = yaml.safe_dump(ConfigContainerBase._convert_value_to_dict(config))
    return found


def _stage(config: Any) -> Any:
    """A stage of a model, as a host hands it over."""
    import torch

    stage = torch.nn.Linear(1, 1)
    stage.config = config
    return stage


def _host(*_: Any) -> None:
    """Of a host, which reduces gradients."""


def steps_of_copies() -> dict[str, tuple[int | None, float]]:
    """The last step and the coefficients, of two steps of a layer under a copy of a config."""
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer import TransformerConfig

    from megasink.megatron import HeadBalance, layer_spec
    from megasink.megatron.layer_balance import MegatronLayerBalance

    kinds = {
        "itself": lambda config: config,
        "pickled": lambda config: pickle.loads(pickle.dumps(config)),
        "pickled statistics": lambda config: pickle.loads(pickle.dumps(config.statistics))._options,
        "deep copy": copy.deepcopy,
        "copy": copy.copy,
    }
    found = {}
    for kind, made in kinds.items():
        shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
        shape |= {"use_cpu_initialization": True, "transformer_impl": "local"}
        config = TransformerConfig(**shape, attention_dropout=0.0)
        balance = HeadBalance(config, attention_variant="sink", head_balance_coeff=1.0).install()
        config.finalize_model_grads_func = _host
        config = made(config)
        layer_spec(config)  # makes it the config of the model
        counter = MegatronLayerBalance(config, 1, mpu.get_tensor_model_parallel_group())
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            out = torch.ones(1, 1, 2, requires_grad=True)
            counter(out, torch.sigmoid(weight)).sum().backward()
            config.finalize_model_grads_func([counter])
            optimizer.step()
        found[kind] = config.statistics.last_number, float(counter.coefficients[0])
        del balance
    return found


def steps_on_a_cpu(variant: str) -> list[tuple[float, float]]:
    """The loss and the imbalance of four steps, with what Megatron can do on a CPU by itself.

    RoPE's frequencies and Megatron's DDP and optimizers want a GPU.
    """
    import torch
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import TransformerConfig

    from megasink.megatron import HeadBalance, stack_spec

    config = TransformerConfig(
        num_layers=4,
        is_hybrid_model=True,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        transformer_impl="local",
    )
    balance = HeadBalance(config, attention_variant=variant, head_balance_coeff=1.0)
    torch.manual_seed(1)
    model = HybridModel(config, stack_spec(config), 64, 64, "*-*-")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balance.install(optimizer)
    tokens = torch.arange(64).reshape(2, 32)
    steps = []
    for _ in range(4):
        optimizer.zero_grad()
        positions = torch.arange(32).expand(2, -1)
        loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        assert balance.last is not None
        steps.append((float(loss), float(balance.last.imbalance)))
    return steps


def other_spec(call: str) -> str:
    """The message for a model whose layers are Megatron's own, as before HeadBalance came."""
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from megasink.megatron import HeadBalance

    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        transformer_impl="local",
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
    )
    balance = HeadBalance(config, attention_variant="sink", head_balance_coeff=1.0)
    config.finalize_model_grads_func = _host
    ends = {"pre_process": mpu.is_pipeline_first_stage()}
    ends |= {"post_process": mpu.is_pipeline_last_stage()}
    model = GPTModel(config, get_gpt_layer_local_spec(), 16, 16, **ends)
    try:
        if call == "host":
            balance.begin(0)
            balance.reduce()
        elif call == "optimizer":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            balance.install(optimizer)
            model(*(torch.zeros(1, 2, dtype=torch.int64),) * 2, None).sum().backward()
            optimizer.step()
        else:
            balance.install()
            config.finalize_model_grads_func([model])
    except RuntimeError as error:
        return str(error)
    return "nothing"
