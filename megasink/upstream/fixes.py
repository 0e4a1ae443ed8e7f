"""Fixes for defects of megatron-core that matter on every platform."""

import functools
from collections.abc import Callable
from typing import Any

from megasink.errors import UserError
from megasink.upstream.patch_register import patches

_patch = patches("always", "tests/cpu/test_patches.py")

ADAM = _patch(
    "Adam with a step per group",
    "megatron.core.optimizer",
    "Adam USING_PYTORCH_OPTIMIZER",
    "without TransformerEngine and apex, checkpoints of the distributed optimizer do not load",
    ": USING_PYTORCH_OPTIMIZER = True",
    ": kwargs['adam_w_mode'] = config.decoupled_weight_decay",
)
ADAM_CHECKPOINTS = _patch(
    "checkpoints with a step per group",
    "megatron.core.optimizer.distrib_optimizer",
    "HAVE_APEX_OR_TE",
    ADAM.reason,
    ":DistributedOptimizer.state_dict: "
    "steps = list(set([s['step'].item() for s in inner_state_dict['state'].values()]))",
    ":DistributedOptimizer.load_state_dict: "
    "steps = list(set([g['step'] for g in state_dict['optimizer']['param_groups']]))",
)
DATASET_HELPERS = _patch(
    "dataset helpers",
    "megatron.core.datasets.utils",
    "compile_helpers",
    "it runs make without a Makefile and exits; the wheel contains the built extension",
    "def compile_helpers()",
    ":compile_helpers: subprocess.run(command)",
    test="tests/training/test_end_to_end.py",
)
CHAINED_STATES = _patch(
    "optimizer states with another expert parallelism or other settings",
    "megatron.core.optimizer.optimizer:ChainedOptimizer",
    "load_state_dict",
    "a checkpoint loads only into one optimizer, but parallel experts need two; groups are matched "
    "by learning rate and weight decay, so no group matches after these change",
    "def load_state_dict(self, state_dict)",
    ":ChainedOptimizer.load_state_dict: len(self.chained_optimizers) != len(state_dict)",
    ":MegatronOptimizer._filter_and_reorder_param_groups: loaded_groups_map[key]",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict: "
    "param_groups_map[needed_groups]",
    test="tests/distributed/test_checkpoint.py",
)
SAVED_SCHEDULE = _patch(
    "schedule kept from the checkpoint",
    "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler",
    "load_state_dict",
    "--use-checkpoint-opt-param-scheduler restores rates that the parameter groups then override",
    "def load_state_dict(self, state_dict)",
    ":OptimizerParamScheduler.get_lr: max_lr = param_group.get('max_lr', self.max_lr)",
    test="tests/training/test_cures.py",
)
SHARDED_STATES = _patch(
    "sharded optimizer states of float32 parameters",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
    "load_parameter_state_from_dp_reshardable",
    "they are copied into views of parameters that require a gradient, which fails",
    "def load_parameter_state_from_dp_reshardable(self, state_dict)",
    ":DistributedOptimizer._set_main_param_and_optimizer_states: "
    "dst_tensors[key].copy_(tensors[key])",
    test="tests/training/test_checkpoint_layout.py",
)
GRADIENT_NORM = _patch(
    "norm of the gradients",
    "megatron.core.optimizer.clip_grads",
    "l2_norm_impl",
    "without TransformerEngine and apex each parameter's norm is read from the device separately",
    ": l2_norm_impl = local_multi_tensor_l2_norm",
    "megatron.core.utils: def local_multi_tensor_l2_norm(chunk_size, noop_flag, *_)",
    "megatron.core.utils:local_multi_tensor_l2_norm: l2_reduced = torch.norm(torch.tensor(l2))",
    test="tests/plan/hollow/test_trainer.py",
)
GLOBAL_LOSS = _patch(
    "gradient of the global balancing loss of experts",
    "megatron.core.transformer.moe.router:TopKRouter",
    "attach_and_log_load_balancing_loss",
    "each data-parallel rank has its share of the loss, which the mean over ranks divides again",
    "def attach_and_log_load_balancing_loss(self, activation, aux_loss_coeff, aux_loss, "
    "aux_loss_name, reduce_group, needs_dp_avg, valid_token_count)",
    ":TopKRouter._apply_global_aux_loss: self.attach_and_log_load_balancing_loss(probs, "
    "global_aux_loss_coeff, global_aux_loss, 'global_load_balancing_loss', self.tp_dp_cp_group, "
    "needs_dp_avg=False, valid_token_count=local_num_tokens)",
    ":TopKRouter.attach_and_log_load_balancing_loss: "
    "MoEAuxLossAutoScaler.apply(activation, aux_loss)",
    test="tests/distributed/test_moe.py",
)


def check_dataset_helpers() -> None:
    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"megatron-core's dataset helpers cannot be imported ({error}): reinstall it with "
            "pip install --force-reinstall --no-deps megatron-core"
        ) from error


def norm_on_the_device(
    chunk_size: int, noop_flag: Any, tensor_lists: Any, per_tensor: bool, *unused: Any
) -> tuple[Any, None]:
    """Return the norm [1] float32 of all tensors, with a kernel for many of them at once."""
    import torch

    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(tensors)]
    return torch.stack(norms).float().norm().reshape(1), None


def of_all_ranks(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Multiply the gradient of the global loss, not its logged value, by the data-parallel size."""

    @functools.wraps(upstream)
    def attach(
        self: Any, activation: Any, coeff: float, loss: Any, name: str, *rest: Any, **named: Any
    ) -> Any:
        if name == "global_load_balancing_loss":
            others = self.tp_dp_cp_group.size() // self.tp_cp_group.size() - 1
            loss = loss + others * (loss - loss.detach())
        return upstream(self, activation, coeff, loss, name, *rest, **named)

    return attach


def refusing_other_rates(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def load(self: Any, state: Any) -> None:
        given = self.max_lr, self.min_lr
        upstream(self, state)
        if given != (self.max_lr, self.min_lr):
            raise UserError(
                f"--use-checkpoint-opt-param-scheduler keeps --lr {self.max_lr:g} and --min-lr "
                f"{self.min_lr:g} of the checkpoint: pass these values, or use "
                f"--override-opt-param-scheduler instead to train with --lr {given[0]:g} and "
                f"--min-lr {given[1]:g}"
            )

    return load


def with_own_settings(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def load(self: Any, state: Any) -> None:
        groups = [optimizer.param_groups for optimizer in self.chained_optimizers]
        upstream(self, for_optimizers(state, groups))

    return load


def for_optimizers(state: Any, own: list[list[dict[str, Any]]]) -> Any:
    """Convert a loaded state: for as many optimizers as the model has, with their own settings.

    A distributed checkpoint loads tensors in the layout of the current model. The parameter groups,
    which all ranks share, keep the saved layout: under the numbers 0, 1, ... of several optimizers,
    or next to the tensors of a single one. Of a group only its step is state. The rest (rates,
    decay, betas) is set by the flags: upstream takes the saved values, and finds a group by them.
    """
    state = dict(enumerate(state)) if isinstance(state, list) else state
    numbered = {key: piece for key, piece in state.items() if isinstance(key, int)}
    single = {key: piece for key, piece in state.items() if not isinstance(key, int)}
    if len(own) == 1:
        saved = [group for piece in numbered.values() for group in _groups_in(piece)]
        layout = numbered.get(0, single)
        saved = saved or _groups_in(single)
        return layout | _with_groups(single, saved, own[0], "optimizer" in layout)
    rest = {k: v for k, v in single.items() if k not in ("optimizer", "param_groups")}
    return {
        number: rest
        | _with_groups(piece, _groups_in(single or piece), groups, "optimizer" in (single or piece))
        for (number, piece), groups in zip(sorted(numbered.items()), own, strict=False)
    }


def _groups_in(piece: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = piece.get("optimizer", piece).get("param_groups", [])
    return groups


def _with_groups(
    piece: dict[str, Any], saved: list[dict[str, Any]], own: list[dict[str, Any]], nested: bool
) -> dict[str, Any]:
    """Add parameter groups to one optimizer's state: its own, at the step of the saved ones."""
    if not saved:
        return piece  # several optimizers, each of which is asked next
    # Groups without parameters on the rank that saved may not have counted.
    steps = [group["step"] for group in saved if "step" in group]
    step = {"step": max(steps)} if steps else {}
    inner = piece.get("optimizer", {}) if nested else piece
    # If tensors are sharded by parameter, these numbers assign them to groups.
    numbers = [{"params": g["params"]} for g in inner.get("param_groups", []) if "params" in g]
    pairs = zip(own, numbers or [{}] * len(own), strict=True)
    groups = [mine | step | number for mine, number in pairs]
    inner = inner | {"param_groups": groups}
    return piece | {"optimizer": inner} if nested else inner
