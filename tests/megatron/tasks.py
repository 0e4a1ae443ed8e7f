"""Tasks for the workers: the bare loop of the example, and the trainer on its batches."""

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

from tests.distributed.worker import forget
from tests.runs import steps as steps_of

STEPS = 4
MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128
    --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 64 --mock-data --num-workers 0 --eval-iters 0
    --micro-batch-size 4 --global-batch-size 16 --lr 3e-3 --lr-decay-style constant
    --weight-decay 0 --adam-eps 1e-5 --log-interval 1""".split()


def as_rank(ranks: int, port: int) -> bool:
    """Make this worker a rank, as torchrun would; False for a worker beyond them."""
    rank = int(os.environ["POOL_RANK"])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update(address | {name: str(value) for name, value in numbers.items()})
    return rank < ranks


def bare_loop(
    layout_: dict[str, int],
    ranks: int,
    port: int,
    steps: int = STEPS,
    fields: dict[str, Any] | None = None,
    gpt: bool = False,
    **options: Any,
) -> list[dict[str, Any]] | None:
    """The losses, gradient norms and head statistics of ``examples/megatron_loop.py``."""
    if not as_rank(ranks, port):
        return None
    from megasink import cpu

    cpu.activate()
    import torch

    from examples import megatron_loop
    from examples.megatron_loop import mock_step, train
    from megasink.megatron import initial_weights

    fields = (fields or {}) | ({"num_layers": 2, "is_hybrid_model": False} if gpt else {})
    config = _replaced(megatron_loop.TransformerConfig, fields)
    model = _gpt_model if gpt else megatron_loop.HybridModel
    changes = {"TransformerConfig": config, "HybridModel": model}
    names = initial_weights.global_names
    torch.distributed.init_process_group("gloo")
    try:
        with (
            mock.patch.multiple(megatron_loop, **changes),
            mock.patch.object(
                initial_weights, "global_names", _names_of_blocks(names) if not gpt else names
            ),
        ):
            history = train(map(mock_step, range(steps)), **layout_, **options)
    finally:
        forget()
    return [
        {
            "lm_loss": loss,
            "grad_norm": norm,
            # An FFN is a layer without heads in a HybridModel.
            "importance": [
                row for row in statistics.importance_LH.tolist() if not any(map(math.isnan, row))
            ],
            "balance_loss": float(statistics.balance_loss),
        }
        for loss, norm, statistics in history
    ]


def _replaced(kind: Any, fields: dict[str, Any]) -> Any:
    return lambda **given: kind(**given | fields)


def _names_of_blocks(names_of: Any) -> Any:
    """Name the layers of ``*-*-`` as those of a GPTModel, whose initial weights they then get."""

    def block(layer: re.Match[str]) -> str:
        return f"decoder.layers.{int(layer[1]) // 2}"

    return lambda model: {
        name: re.sub(r"decoder\.layers\.(\d+)", block, text)
        for name, text in names_of(model).items()
    }


def _gpt_model(config: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a GPTModel for the HybridModel of the example, as stacks do with ``mtp_num_layers``."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megasink.megatron import layer_spec

    kind, spec, args = GPTModel, layer_spec(config), args[:2]
    if config.mtp_num_layers:
        kwargs["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, False)
    return kind(config, spec, *args, **kwargs)


def trainer(flags: list[str], ranks: int, port: int, run: str) -> list[dict[str, Any]] | None:
    """The lines that ``megasink train`` writes on the example's batches; of the last rank."""
    from megasink import cpu

    cpu.activate()
    from megatron.training import get_args

    from examples.megatron_loop import mock_step
    from megasink.training import forward_step
    from tests.distributed.launch_task import train

    calls = 0

    def get_batch(*_: Any) -> dict[str, Any]:
        nonlocal calls
        import torch
        from megatron.core import parallel_state as mpu
        from megatron.core.utils import get_batch_on_this_cp_rank

        batches = list(mock_step(get_args().curr_iteration))
        batch = batches[calls % len(batches)]  # from the first again, where a step runs again
        calls += 1
        batch["loss_mask"] = torch.ones(batch["tokens"].shape)
        targets = batch["loss_mask"].sum()
        group = mpu.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        return {**batch, "targets": targets, "text_targets": None, "before_texts": None}

    with mock.patch.object(forward_step, "get_batch", get_batch):
        train([*MODEL, "--train-iters", str(STEPS), "--run-dir", run, *flags], ranks, port)
    if int(os.environ["POOL_RANK"]) != ranks - 1:
        return None
    return steps_of(Path(run))


def not_ours() -> dict[str, str]:
    """What hosts are told that leave something out. One rank, in a process group of the pool."""
    import torch
    from megatron.core.transformer import TransformerConfig

    from megasink.errors import UserError
    from megasink.megatron import HeadBalance, layer_spec

    def config(attention_dropout: float = 0.0, **more: Any) -> Any:
        shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
        return TransformerConfig(**shape, attention_dropout=attention_dropout, **more)

    def told(call: Any) -> str:
        try:
            call()
        except (RuntimeError, UserError) as error:
            return str(error)
        return "nothing"

    def options(**given: Any) -> str:
        return told(lambda: HeadBalance(config(), **given))

    def gated(**fields: Any) -> None:
        HeadBalance(config(**fields), attention_variant="gated")

    attached = config()
    HeadBalance(attached, attention_variant="vanilla")
    replaced = dataclasses.replace(attached)
    unknown = {"attention_varient": "sink", "head_balance_scope": "globe", "logit_softcap": 15.0}

    def steps(
        *calls: str, microbatches: int = 1, cp: int = 1, dropped: int = -1, **fields: Any
    ) -> str:
        """Run steps of one layer, in each of which a host makes some calls."""
        from megatron.core import parallel_state as mpu
        from torch.optim import SGD

        from megasink.megatron.layer_balance import MegatronLayerBalance

        own = config()
        balance = HeadBalance(own, attention_variant="vanilla", head_balance_coeff=1.0)
        for name, value in fields.items():
            setattr(own, name, value)
        own.use_cpu_initialization = True
        counter = MegatronLayerBalance(own, 1, mpu.get_tensor_model_parallel_group(), cp)
        weight = torch.nn.Parameter(torch.ones(1, 2, 3, 1))
        optimizer = SGD([weight], lr=0.1)
        if "install" in calls or "named" in calls:
            balance.install(optimizer if "named" in calls else None)

        def run() -> None:
            for number in range(3):
                if "begin" in calls:
                    balance.begin(number)
                for _ in range(microbatches):
                    if "scale" in calls:
                        balance.set_loss_scale(torch.ones(1) / microbatches)
                    out = torch.ones(3, 1, 2, requires_grad=True)
                    counter(out, torch.sigmoid(weight)).sum().backward()
                for call in calls:
                    if call in ("reduce", "commit"):
                        getattr(balance, call)()
                    elif call == "optimizer" and number != dropped:
                        optimizer.step()
                if number == dropped:
                    optimizer.zero_grad()

        return f"{told(run)} [{balance.last_number}]"

    return {
        "twice": told(lambda: HeadBalance(attached)),
        "no options": told(lambda: layer_spec(config())),
        "a copy": told(lambda: layer_spec(replaced)),
        "wrong options": told(lambda: HeadBalance(config(0.1), **unknown)),
        "graphs": told(lambda: HeadBalance(config(cuda_graph_impl="local"))),
        "bad numbers": options(head_balance_coeff=-1.0, head_balance_shared_refresh=2),
        "not a number": options(head_balance_coeff=float("nan")),
        "no factor": options(residual_clip=-1.0),
        "too many shared": options(head_balance_shared_heads=2),
        "of another variant": options(attention_variant="sink", gate_position="value"),
        "sinks": told(lambda: gated(softmax_type="learnable")),
        "gate": told(lambda: HeadBalance(config(attention_output_gate=True))),
        "clip": told(lambda: HeadBalance(config(qk_clip=True))),
        "late dropout": steps("begin", "reduce", "commit", attention_dropout=0.1),
        "no scale, fp16": steps("named", "optimizer", fp16=True),
        "no scale, ranks": steps("named", "optimizer", cp=2),
        "no scale": steps("named", "optimizer", microbatches=2),
        "nothing": steps("optimizer"),
        "late": steps("install", "scale", "optimizer", "reduce", "commit"),
        "no reduce": steps("begin", "scale"),
        "no commit": steps("begin", "scale", "reduce"),
        "commit alone": steps("begin", "scale", "commit"),
        "skipped": steps("install", "scale", "reduce", fp16=True),
        "dropped": steps("named", "scale", "reduce", "optimizer", dropped=1),
        "dropped, not reduced": steps("named", "scale", "optimizer", dropped=1),
        "named": steps("named", "scale", "optimizer", microbatches=2),
        "explicit": steps("begin", "scale", "reduce", "commit", microbatches=2),
    }
