"""Task for a worker: Megatron-Bridge's provider and training step, in a loop of four steps.

With the variable MEGASINK_TEST_BRIDGE, folders with megatron-bridge and what it imports
(``pip install --no-deps --target``), they are Bridge's own. It also imports TransformerEngine,
ModelOpt and Energon, none of which runs or is needed on a CPU: what it takes from them has a name
here and nothing else. Without the variable, what Bridge does with the config is done here.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests.distributed.worker import forget
from tests.megatron.tasks import STEPS, as_rank

# What the bare loop has on a CPU, where the block has a user's GPU.
CPU_FIELDS = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "seq_length": 64,
    "vocab_size": 64,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "transformer_impl": "local",
    "hidden_dropout": 0.0,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
}
STANDS_IN = ("transformer_engine", "modelopt", "megatron.energon")


class _Name(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in STANDS_IN):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def of_package(folders: str) -> Any:
    """Bridge's provider, ``_update_model_config_funcs`` and ``train_step``."""
    from megatron.training import training  # noqa: F401  (Megatron looks for TransformerEngine)

    sys.meta_path.insert(0, _StandIns())
    sys.path[:0] = folders.split(os.pathsep)
    from megatron.bridge.training import setup, train

    return setup._update_model_config_funcs, train.train_step


def of_tests() -> Any:
    """As models/gpt_provider.py:251, models/transformer_config.py:154 and training/setup.py:577."""
    from megatron.core import distributed
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    @dataclasses.dataclass
    class GPTModelProvider(TransformerConfig):
        transformer_layer_spec: Any = None
        vocab_size: int = 0
        seq_length: int = 1024
        position_embedding_type: str = "learned_absolute"
        share_embeddings_and_output_weights: bool = True
        cross_entropy_loss_fusion: bool = True

        def __post_init__(self) -> None:
            pass  # fields may change until the end

        def finalize(self) -> None:
            TransformerConfig.__post_init__(self)

        def provide_distributed_model(self, ddp_config: Any, pre_wrap_hook: Any, **_: Any) -> Any:
            own = ("position_embedding_type", "share_embeddings_and_output_weights")
            model = GPTModel(
                self,
                transformer_layer_spec=self.transformer_layer_spec(self, vp_stage=None),
                vocab_size=self.vocab_size,
                max_sequence_length=self.seq_length,
                **{name: getattr(self, name) for name in own},
            )
            (model,) = pre_wrap_hook([model])
            return [distributed.DistributedDataParallel(self, ddp_config, model)]

    def update(model: Any, provider: Any, ddp_config: Any, optimizer: Any, **_: Any) -> None:
        provider.finalize_model_grads_func = distributed.finalize_model_grads
        provider.grad_scale_func = optimizer.scale_loss

    def train_step(
        forward_step: Any, batches: Any, model: Any, optimizer: Any, *call: Any
    ) -> tuple[Any, ...]:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        *_, forward_backward, _ = call
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=4,
            seq_length=64,
            micro_batch_size=4,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        loss, count = sum(line["lm loss"] for line in losses)
        return {"lm loss": loss / count}, 0, norm, None, None

    module = sys.modules["megatron.bridge.models.gpt_provider"] = ModuleType("gpt_provider")
    module.GPTModelProvider = GPTModelProvider  # type: ignore[attr-defined]
    for name in ("megatron.bridge", "megatron.bridge.models"):
        sys.modules[name] = ModuleType(name)
    return update, train_step


def loop(ranks: int, port: int, block: str) -> list[dict[str, Any]] | None:
    """Numbers of each step, on the batches and from the weights of the bare loop."""
    if not as_rank(ranks, port):
        return None
    from megasink import cpu

    cpu.activate()
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from examples import megatron_loop as bare
    from megasink.megatron.initial_weights import initialize_weights

    folders = os.environ.get("MEGASINK_TEST_BRIDGE")
    update, train_step = of_package(folders) if folders else of_tests()
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    def on_a_cpu(self: Any, **fields: Any) -> None:
        made(self, **fields | CPU_FIELDS, activation_func=torch.nn.functional.silu)

    def with_weights(stages: list[Any]) -> list[Any]:
        for stage in stages:
            initialize_weights(stage, bare.SEED)
        return stages

    made, names = GPTModelProvider.__init__, {}
    with mock.patch.object(GPTModelProvider, "__init__", on_a_cpu):
        exec(block, names)
    provider = names["provider"]
    torch.distributed.init_process_group("gloo")
    try:
        mpu.initialize_model_parallel()
        model_parallel_cuda_manual_seed(bare.SEED)
        init_num_microbatches_calculator(0, None, 16, 4, ranks)
        provider.finalize()
        settings = DistributedDataParallelConfig()
        model = provider.provide_distributed_model(
            ddp_config=settings,
            use_cpu_initialization=True,
            pre_wrap_hook=with_weights,
        )
        adam = OptimizerConfig(lr=3e-3, weight_decay=0.0, adam_eps=1e-5)
        optimizer = get_megatron_optimizer(adam, model)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        update(model, provider, settings, optimizer, pg_collection=groups)
        timer = SimpleNamespace(start=lambda barrier: None, stop=lambda: None)
        train = {"micro_batch_size": 4, "empty_unused_memory_level": 0}
        train |= {"check_optimizer_step_success": True, "skip_sync_grad_norm_across_mp": False}
        cfg = {"train": SimpleNamespace(**train), "optimizer": adam, "ddp": settings}
        cfg |= {"dataset": SimpleNamespace(dataloader_type="single"), "model": provider}
        cfg |= {"dist": SimpleNamespace(use_decentralized_pg=True), "data_parallel_size": ranks}
        adam.barrier_with_L1_time = False
        adam.reuse_grad_buf_for_mxfp8_param_ag = False
        state = SimpleNamespace(cfg=SimpleNamespace(**cfg), timers=lambda *_, **__: timer)
        scheduler = SimpleNamespace(step=lambda increment: None)
        history = []

        def forward_step(batches: Any, stage: Any) -> Any:
            out, loss_function = bare.forward_step(batches, stage)

            def with_name(losses: Any) -> Any:
                loss, count, both = loss_function(losses)
                return loss, count, {"lm loss": both}

            return out, with_name

        for step in range(STEPS):
            batches = bare.mock_step(step)
            call = (optimizer, scheduler, state, groups, get_forward_backward_func(), None)
            losses, skipped, *_, norm, _, _ = train_step(forward_step, batches, model, *call)
            last = provider.statistics.last
            history.append(
                {
                    "lm_loss": float(losses["lm loss"]),
                    "grad_norm": norm,
                    "importance": last.importance_LH.tolist(),
                    "balance_loss": float(last.balance_loss),
                    "skipped": skipped,
                    "committed": provider.statistics.last_number,
                }
            )
    finally:
        forget()
    return history
