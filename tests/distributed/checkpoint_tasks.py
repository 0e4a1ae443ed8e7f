"""Tasks: save a trained tiny GPT under one layout, load it under another, train on.

The saving and loading are megatron.core's own, with the metadata that
megatron/training/checkpointing.py:468 gives under --dist-ckpt-optim-fully-reshardable.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.training.models.gpt import GPTModelBuilder, default_layer_spec

from megasink.checkpoints.gpt_as_hybrid import layer_maps, point_at_gpt_keys
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.megatron.checkpoint_parts import named_parts
from megasink.megatron.initial_weights import global_names
from megasink.training.load_other_models import accepting_megatrons_checkpoints
from tests.distributed import tiny_gpt
from tests.distributed.tiny_gpt import MICROBATCH, MICROBATCHES


class Run:
    """A model, its optimizer, and the step that comes next."""

    def __init__(
        self,
        distributed_optimizer: bool,
        optimizer_options: dict[str, Any] | None = None,
        **options: Any,
    ):
        config = tiny_gpt.model_config(**options)
        self.models = tiny_gpt.build(config, use_distributed_optimizer=distributed_optimizer)
        self.optimizer, self.scheduler = tiny_gpt.optimizer_of(
            config, self.models, distributed_optimizer, **(optimizer_options or {})
        )
        dp = parallel_state.get_data_parallel_world_size()
        init_num_microbatches_calculator(0, None, MICROBATCH * MICROBATCHES, MICROBATCH, dp)
        config.transformer.grad_scale_func = self.optimizer.scale_loss
        self.transformer = config.transformer
        self.step = 0

    def train(self, steps: int) -> list[float | None]:
        """The loss of each step."""
        losses = []
        for _ in range(steps):
            losses.append(tiny_gpt.run_step(self.models, self.optimizer, self.step))
            tiny_gpt.statistics(self.transformer)
            self.optimizer.step()
            self.scheduler.step(MICROBATCH * MICROBATCHES)
            self.step += 1
        return losses

    def state(self, loading: bool) -> dict[str, Any]:
        """The sharded state dict, as Megatron's training loop builds it."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model_state = {
            f"model{index}": model.sharded_state_dict(metadata=metadata)
            for index, model in enumerate(unwrap_model(self.models))
        }
        optimizer_state = self.optimizer.sharded_state_dict(
            model_state, is_loading=loading, metadata=metadata
        )
        return {
            **{key.removesuffix("0"): state for key, state in model_state.items()},
            "optimizer": optimizer_state,
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def save(self, folder: str) -> None:
        """Write a torch_dist checkpoint."""
        dist_checkpointing.save(self.state(loading=False), folder, ("torch_dist", 1))

    def load(self, folder: str, pattern: str | None = None) -> None:
        """Read it, in whatever layout it was written; into a pattern, that of a GPT model."""
        state = self.state(loading=True)
        if pattern is not None:
            known = read_metadata(Path(folder)).state_dict_metadata
            point_at_gpt_keys(state, layer_maps(pattern), known)
        with accepting_megatrons_checkpoints():
            state = dist_checkpointing.load(state, folder)
        (model,) = unwrap_model(self.models)
        model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def everything(self) -> dict[str, Any]:
        """Weights and, where a rank holds them whole (dp = 1), the states of the distributed
        optimizer."""
        found = {"weights": tiny_gpt.shards(self.models, "data")}
        # One more for experts, where there is expert parallelism.
        optimizer, *more = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        replicas = parallel_state.get_data_parallel_world_size()
        if replicas > 1 or more or not isinstance(optimizer, DistributedOptimizer):
            return found
        for model in unwrap_model(self.models):
            names = global_names(model)
            for name, parameter in model.named_parameters():
                states = optimizer._get_main_param_and_optimizer_states(parameter)
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    whole = states[key].detach().float().view(parameter.shape).clone()
                    global_name = names[name].replace("final_layernorm", "final_norm")  # as shards
                    for part_name, part in named_parts(global_name, parameter, whole):
                        shard = found["weights"][part_name]
                        found.setdefault(key, {})[part_name] = {**shard, "tensor": part}
        return found


def save_and_go_on(folder: str, **options: Any) -> dict[str, Any]:
    """Two steps, a checkpoint, one more step."""
    run = Run(**options)
    run.train(2)
    run.save(folder)
    saved = run.everything()
    return {"saved": saved, "loss": run.train(1), "after": run.everything()["weights"]}


def load_and_go_on(folder: str, **options: Any) -> dict[str, Any]:
    """Load the checkpoint, one step."""
    run = Run(**options)
    run.load(folder)
    loaded = run.everything()
    return {
        "saved": loaded,
        "step": run.step,
        "loss": run.train(1),
        "after": run.everything()["weights"],
    }


def save_as_megatron(folder: str, **options: Any) -> dict[str, Any]:
    """As `save_and_go_on`, with the tensors that Megatron's own model has, and no others."""
    run = Run(gpt=True, **options)
    run.train(2)
    state = run.state(loading=False)
    state["model"] = {n: entry for n, entry in state["model"].items() if "head_counter" not in n}
    config = tiny_gpt.model_config(gpt=True, **_of_model(options))
    config.transformer_layer_spec, config.pre_wrap_hooks = default_layer_spec, []
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stock = GPTModelBuilder(config).build_model(groups).sharded_state_dict()
    wanted, found = (_shapes(entries) for entries in (stock, state["model"]))
    assert wanted == found
    dist_checkpointing.save(state, folder, ("torch_dist", 1))
    return {"loss": run.train(1)}


def _of_model(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "distributed_optimizer"}


def _shapes(state: dict[str, Any]) -> set[tuple[str, tuple[int, ...]]]:
    tensors = (entry for entry in state.values() if isinstance(entry, ShardedTensor))
    return {(entry.key, tuple(entry.global_shape)) for entry in tensors}


def load_into_a_hybrid(folder: str, pattern: str, **options: Any) -> dict[str, Any]:
    """Load the checkpoint of a GPT model, one step."""
    run = Run(pattern=pattern, **options)
    run.load(folder, pattern)
    return {"step": run.step, "loss": run.train(1)}


def prediction_keys() -> list[str]:
    """Keys of a GPT model that a layer of multi-token prediction of a hybrid is pointed at."""
    names = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
    prefix = "optimizer.state.exp_avg.mtp.layers.0.mtp_model_layer.layers"
    state = {
        n: ShardedTensor.from_rank_offsets(f"{prefix}.{layer}.{n}", torch.zeros(2))
        for layer, n in enumerate(names)
    }
    point_at_gpt_keys(state, layer_maps("*-*E/*-"), ["decoder.layers.mlp.linear_fc2.weight"])
    return [entry.key for entry in state.values()]


def megatrons_checkpoint(folder: str, **options: Any) -> dict[str, Any]:
    """Megatron's own model with an output gate writes a checkpoint, and ours loads it."""
    options["gpt"] = True
    config = tiny_gpt.model_config(
        attention_variant="vanilla", attention_output_gate=True, head_balance_coeff=0.0, **options
    )
    config.transformer_layer_spec = default_layer_spec
    config.pre_wrap_hooks = []
    groups = ProcessGroupCollection.use_mpu_process_groups()
    theirs = GPTModelBuilder(config).build_model(groups)
    state = {"model": theirs.sharded_state_dict()}
    assert not any("head_counter" in key for key in state["model"])
    dist_checkpointing.save(state, folder, ("torch_dist", 1))
    run = Run(False, attention_variant="gated", gate_granularity="elementwise", **options)
    (ours,) = unwrap_model(run.models)
    with accepting_megatrons_checkpoints():
        loaded = dist_checkpointing.load({"model": ours.sharded_state_dict()}, folder)
    ours.load_state_dict(loaded["model"])
    weights = [tiny_gpt.shards([model], "data") for model in (theirs, ours)]
    return {"theirs": weights[0], "ours": weights[1], "loss": run.train(1)}
