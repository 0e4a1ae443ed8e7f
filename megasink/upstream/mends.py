"""Fixes for defects of megatron-core that matter on every platform."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

from megasink.errors import UserError
from megasink.upstream.register import patches

_patch = patches("always", "tests/platform/test_patches.py")

ADAM = _patch(
    "Adam with a step per group",
    "megatron.core.optimizer",
    "Adam USING_PYTORCH_OPTIMIZER",
    "without TransformerEngine and apex, checkpoints of the distributed optimizer do not load",
    "megatron.core.optimizer: USING_PYTORCH_OPTIMIZER = True",
    "megatron.core.optimizer: kwargs['adam_w_mode'] = config.decoupled_weight_decay",
)
ADAM_CHECKPOINTS = _patch(
    "checkpoints with a step per group",
    "megatron.core.optimizer.distrib_optimizer",
    "HAVE_APEX_OR_TE",
    ADAM.reason,
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict: "
    "steps = list(set([s['step'].item() for s in inner_state_dict['state'].values()]))",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict: "
    "steps = list(set([g['step'] for g in state_dict['optimizer']['param_groups']]))",
)
DATASET_HELPERS = _patch(
    "dataset helpers",
    "megatron.core.datasets.utils",
    "compile_helpers",
    "it runs make without a Makefile and exits; the wheel contains the built extension",
    "megatron.core.datasets.utils: def compile_helpers()",
    "megatron.core.datasets.utils:compile_helpers: subprocess.run(command)",
    test="tests/train/test_end_to_end.py",
)
PARAMETER_ORDER = _patch(
    "order of float32 parameters",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
    "_build_optimizer_group_ranges",
    "parameters are numbered in the order of the gradient buffers, but the inner optimizer gets "
    "float32 ones first: under bf16, sinks would save and load the states of other parameters",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer: "
    "def _build_optimizer_group_ranges(cls, param_groups, gbuf_ranges)",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_optimizer_group_ranges: "
    "local_param_group_map[param] = (group_index, len(group_range['params']) - 1)",
    "megatron.core.optimizer.distrib_optimizer:"
    "DistributedOptimizer._build_model_and_main_param_groups: "
    "[*shard_fp32_params_this_group, *shard_fp32_from_float16_params_this_group]",
    test="tests/distributed/test_checkpoint.py",
)
FLOAT32_STATES = _patch(
    "states of float32 parameters",
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
    "state_dict sharded_state_dict load_state_dict",
    "the state of a bf16 model's optimizer is saved as if no parameter were float32",
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict: "
    "chain.from_iterable(g for g in self.float16_groups)",
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.state_dict: "
    "state_dict['fp32_from_fp16_params'] = self.fp32_from_float16_groups",
    test="tests/distributed/test_checkpoint.py",
    mended="0.20",
)
CHAINED_STATES = _patch(
    "states under another expert parallelism",
    "megatron.core.optimizer.optimizer.ChainedOptimizer",
    "load_state_dict",
    "a checkpoint of one optimizer loads only into one, but experts have a second one",
    "megatron.core.optimizer.optimizer:ChainedOptimizer: def load_state_dict(self, state_dict)",
    "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict: "
    "len(self.chained_optimizers) != len(state_dict)",
    test="tests/distributed/test_checkpoint.py",
)
GRADIENT_NORM = _patch(
    "norm of the gradients",
    "megatron.core.optimizer.clip_grads",
    "l2_norm_impl",
    "without TransformerEngine and apex every parameter's norm is read from the device by itself",
    "megatron.core.optimizer.clip_grads: l2_norm_impl = local_multi_tensor_l2_norm",
    "megatron.core.utils: def local_multi_tensor_l2_norm(chunk_size, noop_flag, *_)",
    "megatron.core.utils:local_multi_tensor_l2_norm: l2_reduced = torch.norm(torch.tensor(l2))",
    test="tests/hollow/test_trainer.py",
)

PREDICTION_SPEC = _patch(
    "layers of multi-token prediction",
    "megatron.training.models.gpt",
    "mtp_block_spec",
    "it takes Megatron's own layers, whatever the layer spec of the model",
    "megatron.training.models.gpt: def mtp_block_spec(config, transformer_layer_spec, vp_stage)",
    "megatron.training.models.gpt:mtp_block_spec: spec = decoder_specs[-1]",
    "megatron.training.models.gpt:GPTModelBuilder.build_model: "
    "mtp_spec = mtp_block_spec(self._model_config, transformer_layer_spec, vp_stage=vp_stage)",
    test="tests/layers/test_prediction.py",
)


def mend_upstream() -> None:
    """Apply the patches above once, in every process that uses Megatron.

    Raises:
        UserError: upstream's source has changed, or its dataset helpers cannot be imported.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    from megasink.upstream import copies, muon
    from megasink.upstream.adam import GroupStepAdam

    if DATASET_HELPERS.is_active:
        return
    DATASET_HELPERS.apply(compile_helpers=_check_dataset_helpers)
    if optimizer.USING_PYTORCH_OPTIMIZER:
        ADAM.apply(Adam=GroupStepAdam, USING_PYTORCH_OPTIMIZER=False)
        ADAM_CHECKPOINTS.apply(HAVE_APEX_OR_TE=True)
    ranges = _float32_first(DistributedOptimizer._build_optimizer_group_ranges)
    PARAMETER_ORDER.apply(_build_optimizer_group_ranges=staticmethod(ranges))
    methods = FLOAT32_STATES.originals()
    FLOAT32_STATES.apply(**{name: _with_every_parameter(f) for name, f in methods.items()})
    load = _for_any_expert_parallelism(ChainedOptimizer.load_state_dict)
    CHAINED_STATES.apply(load_state_dict=load)
    if clip_grads.l2_norm_impl.__name__ == "local_multi_tensor_l2_norm":
        GRADIENT_NORM.apply(l2_norm_impl=_norm_on_the_device)
    copies.mend()
    muon.mend()


def _check_dataset_helpers() -> None:
    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"megatron-core's dataset helpers cannot be imported ({error}): reinstall it with "
            "pip install --force-reinstall --no-deps megatron-core"
        ) from error


def _norm_on_the_device(
    chunk_size: int, noop_flag: Any, tensor_lists: Any, per_tensor: bool, *unused: Any
) -> tuple[Any, None]:
    """Return the norm [1] float32 of all tensors, with a kernel for many of them at once."""
    import torch

    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(tensors)]
    return torch.stack(norms).float().norm().reshape(1), None


def _float32_first(upstream: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def build(param_groups: Any, gbuf_ranges: Any) -> tuple[dict[Any, tuple[int, int]], Any]:
        _, group_ranges = upstream(param_groups, gbuf_ranges)
        positions = {}
        for index, group in enumerate(group_ranges):
            group["params"].sort(key=lambda p: p.dtype is not torch.float32)  # stable
            for order, parameter in enumerate(group["params"]):
                positions[parameter] = (index, order)
        return positions, group_ranges

    return build


def _with_every_parameter(method: Callable[..., Any]) -> Callable[..., Any]:
    """Treat float32 parameters as their own main parameters while `method` saves or loads."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_stub_optimizer or not any(self.fp32_from_fp32_groups):
            return method(self, *args, **kwargs)
        groups = self.float16_groups, self.fp32_from_float16_groups
        pairs = (zip(*pair, strict=True) for pair in zip(*groups, strict=True))
        model_of = {id(main): model for pair in pairs for model, main in pair}
        mains = [list(group["params"]) for group in self.optimizer.param_groups]
        self.float16_groups = [[model_of.get(id(p), p) for p in group] for group in mains]
        self.fp32_from_float16_groups = mains
        try:
            return method(self, *args, **kwargs)
        finally:
            self.float16_groups, self.fp32_from_float16_groups = groups

    return wrapper


def _for_any_expert_parallelism(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def load(self: Any, state: Any) -> None:
        groups = [optimizer.param_groups for optimizer in self.chained_optimizers]
        upstream(self, for_optimizers(state, groups) if isinstance(state, dict) else state)

    return load


def for_optimizers(state: dict[Any, Any], own: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """Convert the loaded state of one optimizer for several, or of several for one.

    A distributed checkpoint loads tensors in the layout of the current model. The parameter group
    settings, which all ranks share, keep the saved layout: under the numbers 0, 1, ... of several
    optimizers, or next to the tensors of a single one.

    Args:
        state: from megatron.core.dist_checkpointing; not modified.
        own: the parameter groups of each optimizer of the current model.

    Returns:
        the state in the current model's layout: numbered for several optimizers, else not.
    """
    numbered = {key: piece for key, piece in state.items() if isinstance(key, int)}
    whole = {key: piece for key, piece in state.items() if not isinstance(key, int)}
    if not numbered or not whole:
        return state  # the layout is unchanged
    if len(own) == 1:
        saved = [group for piece in numbered.values() for group in _groups_in(piece)]
        return numbered[0] | _with_groups(whole, saved, own[0], "optimizer" in numbered[0])
    nested = "optimizer" in whole
    return {
        number: {k: v for k, v in whole.items() if k not in ("optimizer", "param_groups")}
        | _with_groups(piece, _groups_in(whole), own[number], nested)
        for number, piece in numbered.items()
    }


def _groups_in(piece: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = piece.get("optimizer", piece)["param_groups"]
    return groups


def _with_groups(
    piece: dict[str, Any], saved: list[dict[str, Any]], own: list[dict[str, Any]], nested: bool
) -> dict[str, Any]:
    """Add the saved group settings to one optimizer's state; experts have the same settings."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    keys = [key for key in param_group_identifier_keys if key != "is_expert_parallel"]
    inner = piece.get("optimizer", {}) if nested else piece
    # If tensors are sharded by parameter, these numbers assign them to groups.
    numbers = inner.get("param_groups", [{}] * len(own))
    groups = []
    for mine, number in zip(own, numbers, strict=True):
        same = (g for g in saved if all(g.get(key) == mine.get(key) for key in keys))
        # If none matches, upstream reports the missing group.
        for group in itertools.islice(same, 1):
            expert = {"is_expert_parallel": mine["is_expert_parallel"]}
            groups.append(group | expert | number)
    inner = inner | {"param_groups": groups}
    return piece | {"optimizer": inner} if nested else inner
