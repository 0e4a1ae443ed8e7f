"""Tasks for the workers: mistakes of a host of a small HybridModel, and their messages."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

SINK: dict[str, Any] = {"attention_variant": "sink", "head_balance_coeff": 1.0}
LENGTH = 12


def config_of(**more: Any) -> Any:
    """Of two blocks, in a HybridModel."""
    import torch
    from megatron.core.transformer import TransformerConfig

    fields = {
        "num_layers": 4,
        "is_hybrid_model": True,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 32,
        "init_method_std": 0.5,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "params_dtype": torch.float32,
    }
    return TransformerConfig(**fields | more)


def model_of(config: Any, spec: Any = None) -> Any:
    """A HybridModel of two blocks; the same for equal configs."""
    import torch
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megasink.megatron import stack_spec

    torch.manual_seed(1)
    return HybridModel(config, spec or stack_spec(config), 16, LENGTH, "*-*-")


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def tokens(rows: int = 2, length: int = LENGTH) -> Any:
    import torch

    return torch.arange(rows * LENGTH).reshape(rows, LENGTH)[:, :length] * 7 % 16


def losses(model: Any, text: Any, mask: Any = None) -> Any:
    import torch

    where = torch.arange(text.shape[1]).expand_as(text)
    return model(text, where, mask, labels=text.roll(-1, 1))


def warned(call: Callable[[], Any]) -> list[str]:
    """The warnings of a call that name the loss or padding."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in said if "HeadBalance" in str(w.message)]


def wrapped(model: Any) -> Any:
    """In Megatron's DDP."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    model.config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def run_schedule(model: Any, texts: list[Any]) -> None:
    """Forward and backward passes of a step by Megatron's schedule; None among texts raises."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Any, chunk: Any) -> Any:
        text = next(iterator)
        if text is None:
            raise KeyError("text")
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return losses(chunk, text, mask), lambda loss: (loss.mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(texts),
        model=[model],
        num_microbatches=len(texts),
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )


def misuses() -> dict[str, Any]:
    """Return the message for each mistake."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megasink.megatron import HeadBalance, layer_spec, stack_spec

    found: dict[str, Any] = {}
    config = config_of(heterogeneous_block_specs=True)
    balance = HeadBalance(config, **SINK)
    found["keeps its specs"] = config.heterogeneous_block_specs
    model = model_of(config)
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    documents = causal.clone()
    documents[..., LENGTH // 2 :, : LENGTH // 2] = True
    balance.begin(0)
    found["causal"] = told(lambda: losses(model, tokens(), causal))
    found["documents"] = told(lambda: losses(model, tokens(), documents))

    def one_in_eval() -> None:
        model.decoder.layers[2].eval()
        balance.begin(0)
        losses(model, tokens()).mean().backward()
        balance.reduce()

    found["eval"] = told(one_in_eval)

    def stock(call: str) -> None:
        own = config_of(num_layers=2, is_hybrid_model=False)
        balance = HeadBalance(own, **SINK)
        spec = layer_spec(own)
        spec.layer_specs[1] = get_gpt_layer_local_spec()
        model = GPTModel(own, spec, 16, LENGTH)
        balance.begin(0)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        losses(model, tokens(), mask).mean().backward()
        if call == "schedule":
            own.finalize_model_grads_func = lambda *_: None
            balance.install()
            own.finalize_model_grads_func([model])
        else:
            balance.reduce()

    found["stock"] = told(lambda: stock("host"))
    found["stock, schedule"] = told(lambda: stock("schedule"))
    own = config_of(num_layers=2, is_hybrid_model=False)
    HeadBalance(own, **SINK)
    stock_model = GPTModel(own, get_gpt_layer_local_spec(), 16, LENGTH)
    found["no call"] = warned(lambda: run_schedule(wrapped(stock_model), [tokens()] * 2))
    short = config_of(num_layers=2)
    HeadBalance(short, **SINK)
    found["short"] = told(lambda: model_of(short))
    with mock.patch.dict(os.environ, {"MEGASINK_OPTIONS": '{"head_balance_coeff": 1.0}'}):
        own = config_of()
        whole = model_of(own, stack_spec)  # as --spec of pretrain_hybrid.py
    found["spec itself"] = own.statistics.installed, own.statistics.expected
    same = {name: torch.equal(p, dict(model.named_parameters())[name]) for name, p in _of(whole)}
    found["same model"] = all(same.values()) and len(same) > 8
    return found


def _of(model: Any) -> Any:
    return model.named_parameters()


def padding() -> dict[str, Any]:
    """Importances, gradients and warnings of rows with and without padding on the right."""
    found: dict[str, Any] = {}

    def run(name: str, length: int) -> None:
        found[name] = padded_steps(length, name == "padded")

    for name, length in (("padded", LENGTH), ("unpadded", 8), ("unmarked", LENGTH)):
        said = warned(partial(run, name, length))
        found[name] = *found[name], said
    return found


def padded_steps(length: int, marked: bool) -> tuple[Any, Any]:
    """Importances and gradients of two steps of 8 tokens a row, and padding up to a length."""
    import torch

    from megasink.megatron import HeadBalance

    config = config_of()
    balance = HeadBalance(config, **SINK | {"head_balance_coeff": 10.0})
    model = model_of(config)
    real = (torch.arange(length) < 8).expand(2, -1)
    for step in range(2):
        model.zero_grad()
        balance.begin(step)
        if marked:
            balance.set_real_tokens(real)
        text = tokens(length=length).masked_fill(~real, 3)
        where = torch.arange(length).expand_as(text)
        output = model(text, where, None, labels=text)
        balance.keep(output)[:, :8].mean().backward()
        balance.reduce()
        balance.commit()
    grads = {n: p.grad for n, p in model.named_parameters() if "attention" in n}
    return balance.last.importance_LH[::2], grads


def masks_of_ranks() -> list[str]:
    """The messages for masks over the tokens of a context-parallel rank."""
    import torch
    from megatron.core import parallel_state as mpu

    from megasink.megatron import HeadBalance
    from megasink.megatron.context_parallel import own_chunks

    config = config_of(context_parallel_size=2)
    balance = HeadBalance(config, **SINK)
    model = model_of(config)
    group = mpu.get_context_parallel_group()
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    documents = causal.clone()
    documents[..., LENGTH // 2 :, : LENGTH // 2] = True
    text = own_chunks(tokens(), 2, group.rank(), dim=1)
    balance.begin(0)
    masks = [own_chunks(mask, 2, group.rank(), dim=2) for mask in (causal, documents)]
    return [told(lambda mask=mask: losses(model, text, mask)) for mask in (*masks, causal)]


def repeated_schedule() -> dict[str, Any]:
    """The last step, importances and coefficients; one run fails in the second microbatch."""
    from megasink.megatron import HeadBalance

    found = {}
    for name in ("whole", "broken"):
        config = config_of()
        balance = HeadBalance(config, **SINK).install()
        chunk = wrapped(model_of(config))
        for step in range(3):
            for text in (None, tokens()) if name == "broken" and step == 1 else (tokens(),):
                chunk.zero_grad_buffer()
                try:
                    run_schedule(chunk, [(tokens() + step) % 16, text, tokens()])
                except KeyError:
                    assert text is None
        counters = [m for n, m in chunk.named_modules() if n.endswith("head_counter")]
        coefficients = [counter.coefficients for counter in counters]
        found[name] = balance.last_number, balance.last.importance_LH[::2], *coefficients
    return found


def repeated() -> dict[str, Any]:
    """Steps, importances and warnings of hosts that repeat a step after an exception."""
    import torch

    from megasink.megatron import HeadBalance

    class Broken(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise KeyError("optimizer")
            super().step()

    found = {}
    for name in ("whole", "in the optimizer", "before it", "another optimizer"):
        config = config_of()
        balance = HeadBalance(config, **SINK)
        model = model_of(config)
        optimizer = Broken(model.parameters(), lr=0.0)
        balance.install(optimizer)
        another = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for step in range(2):
            broken = step == 1 and name in ("in the optimizer", "before it")
            for attempt in range(1 + broken):
                optimizer.zero_grad()
                for part in range(2):
                    balance.set_loss_scale(0.5)
                    text = tokens() + (part + (5 if broken and not attempt else 0))
                    losses(model, text % 16).mean().backward()
                    if name == "another optimizer":
                        another.step()
                if broken and not attempt:
                    if name == "in the optimizer":
                        optimizer.fails = True
                        try:
                            optimizer.step()
                        except KeyError:
                            optimizer.fails = False
                    continue
                optimizer.step()
        found[name] = balance.last_number, balance.last.importance_LH[::2]
    return found
