"""Tasks for the workers: slime's model provider and its training step, in a loop of four steps.

With the variable MEGASINK_TEST_SLIME, a checkout of slime, its own ``model_provider.py`` and
``model.py`` are run as they are, and what they import beside Megatron is stood in for (the data and
the loss are the tests' own). Without, what they do with the layer spec and the optimizer is done
here.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests.distributed.worker import forget
from tests.megatron.tasks import MODEL, STEPS, as_rank

FLAGS = [
    *MODEL,
    *"""--train-iters 4 --hidden-dropout 0 --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-rope-fusion --no-bias-dropout-fusion --distributed-backend gloo
    --use-cpu-initialization --vocab-size 64 --make-vocab-size-divisible-by 64""".split(),
]
# Of slime's own flags, what its step reads.
SLIME = {
    "custom_megatron_before_train_step_hook_path": None,
    "custom_model_provider_path": None,
    "rollout_top_p": 1.0,
    "data_pad_size_multiplier": 128,
    "allgather_cp": False,
    "save_debug_train_data": None,
    "enable_mtp_training": False,
    "ci_test": False,
    "decoder_seq_length": None,
}


def get_batch(batches: Iterator[dict[str, Any]], *_: Any) -> dict[str, Any]:
    """A microbatch as slime's data.py makes it: one row of documents, in thd."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(batches)
    rows, length = batch["tokens"].shape
    ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=length, max_seqlen_kv=length)
    row = {name: batch[name].reshape(1, -1) for name in ("tokens", "labels")}
    others = {"multimodal_train_inputs": None, "full_loss_masks": None}
    return {**row, **others, "packed_seq_params": packed, "bad": batch["bad"]}


def loss_function(args: Any, batch: Any, microbatches: int, samples: int, logits: Any) -> Any:
    """Cross-entropy; infinite for a batch that is to be dropped."""
    import torch
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    losses = vocab_parallel_cross_entropy(logits.float(), batch["labels"])
    loss, count = losses.sum(), torch.full((), losses.numel())
    return loss * (torch.inf if batch["bad"] else 1), count, torch.stack([loss.detach(), count])


def of_checkout(folder: str) -> Any:
    """``get_model_provider_func`` and ``train_one_step`` of slime's own files."""
    parts = "utils.misc utils.memory_utils observability.logging_utils "
    parts += "observability.train_metric_utils backends.megatron_utils.checkpoint "
    parts += "backends.megatron_utils.data backends.megatron_utils.loss"
    for part in parts.split():
        names = ["slime", *part.split(".")]
        for end in range(1, len(names) + 1):
            name = ".".join(names[:end])
            module = sys.modules.setdefault(name, ModuleType(name))
            module.__path__ = []
            if end > 1:
                setattr(sys.modules[".".join(names[: end - 1])], names[end - 1], module)
    slime = sys.modules["slime"]
    ours: Any = slime.backends.megatron_utils
    slime.utils.misc.load_function = slime.utils.memory_utils.clear_memory = None
    slime.observability.train_metric_utils.reduce_train_step_metrics = lambda losses, **_: losses
    ours.checkpoint.load_checkpoint = ours.checkpoint.save_checkpoint = None
    ours.data.DataIterator, ours.data.get_batch = Iterator, get_batch
    ours.loss.loss_function, ours.loss.ROLLOUT_TOP_P_TOKEN_KEYS = loss_function, []
    ours.loss.get_rollout_top_p_logprob_kwargs = None
    for name in ("stateless_adam", "model_provider", "model"):
        path = Path(folder, "slime", "backends", "megatron_utils", f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"{ours.__name__}.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[f"slime.backends.megatron_utils.{name}"] = (
            importlib.util.module_from_spec(spec)
        )
        spec.loader.exec_module(module)
    return module


def get_model_provider_func(args: Any) -> Any:
    """As model_provider.py:131 to 212, for a model with a spec."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training.arguments import core_transformer_config_from_args

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        config = core_transformer_config_from_args(args)
        return GPTModel(
            config=config,
            transformer_layer_spec=import_module(args.spec)(args, config, vp_stage),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=False,
            position_embedding_type=args.position_embedding_type,
        )

    return provider


def train_one_step(args: Any, *call: Any) -> Any:
    """As model.py:512: a gradient that is not finite is dropped, without optimizer.step()."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    _, _, batches, model, optimizer, scheduler, microbatches, samples = call

    def forward_step(batches: Any, model: Any) -> Any:
        batch = get_batch(batches)
        packed = {"packed_seq_params": batch["packed_seq_params"]}
        out = model(batch["tokens"], position_ids=None, attention_mask=None, labels=None, **packed)
        return out, partial(loss_function, args, batch, microbatches, samples)

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    norm = math.nan
    if not args.check_for_nan_in_loss_and_grad and not optimizer.prepare_grads():
        norm = optimizer.get_grad_norm()
    if args.check_for_nan_in_loss_and_grad or math.isfinite(norm):
        _, norm, _ = optimizer.step()
        scheduler.step(increment=samples)
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return losses, norm


def loop(
    ranks: int, port: int, flags: list[str], options: str, bad: int = -1
) -> list[dict[str, Any]] | None:
    """Numbers of each step, on the batches and from the weights of the bare loop."""
    if not as_rank(ranks, port):
        return None
    from megasink import cpu

    cpu.activate()
    import torch
    from megatron.core import distributed
    from megatron.core import parallel_state as mpu
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.utils import get_model_config
    from megatron.training import arguments, global_vars

    from examples.megatron_loop import MICROBATCHES, SEED, mock_step
    from megasink.megatron.initial_weights import initialize_weights

    folder = os.environ.get("MEGASINK_TEST_SLIME")
    slime = of_checkout(folder) if folder else sys.modules[__name__]
    torch.distributed.init_process_group("gloo")
    with mock.patch.object(sys, "argv", ["slime", *FLAGS, *flags]):
        args = arguments.parse_args()
        arguments.validate_args(args)
    vars(args).update(SLIME, padded_vocab_size=64, check_for_nan_in_loss_and_grad=bad < 0)
    global_vars.set_args(args)
    try:
        mpu.initialize_model_parallel()
        model_parallel_cuda_manual_seed(SEED)
        with mock.patch.dict(os.environ, MEGASINK_OPTIONS=options):
            stage = slime.get_model_provider_func(args)(pre_process=True, post_process=True)
        initialize_weights(stage, SEED)
        config = get_model_config(stage)
        settings = distributed.DistributedDataParallelConfig()
        model = [distributed.DistributedDataParallel(config, settings, stage)]
        settings = OptimizerConfig(lr=3e-3, weight_decay=0.0, adam_eps=1e-5)
        optimizer = get_megatron_optimizer(settings, model)
        # As slime's train() does, after the model is built.
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = distributed.finalize_model_grads
        scheduler = SimpleNamespace(step=lambda increment: None)
        history, balance = [], config.statistics
        for step in range(STEPS):
            batches = ({**batch, "bad": step == bad} for batch in mock_step(step))
            before = [p.detach().clone() for p in stage.parameters()]
            samples = (MICROBATCHES // ranks, args.global_batch_size)
            call = (args, 0, step, batches, model, optimizer, scheduler, *samples)
            losses, norm = slime.train_one_step(*call)
            loss, count = sum(losses)
            pairs = zip(before, stage.parameters(), strict=True)
            moved = any(bool((a != b).any()) for a, b in pairs)
            line = {"lm_loss": float(loss / count), "grad_norm": norm, "moved": moved}
            history.append(line | {"committed": balance.last_number})
            if balance.last_number == step:
                history[-1] |= {
                    "importance": balance.last.importance_LH.tolist(),
                    "balance_loss": float(balance.last.balance_loss),
                }
    finally:
        forget()
    return history
