"""Versions present, upstream defects mended, one clear error for each missing part."""

import functools
import importlib.metadata
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

from megasink.errors import UserError

# What was tested; a release outside may move the places that layers and platform hold on to.
SUPPORTED = {"megatron-core": ((0, 19), (0, 20)), "torch": ((2, 11), None)}
REPORTED = (
    "megatron-core",
    "torch",
    "transformer-engine",
    "flash-attn",
    "flash-attn-4",
    "apex",
    "transformers",
    "tokenizers",
    "sentencepiece",
    "numpy",
)


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Python and every package of interest that is installed, with its version."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    found |= {name: v for name in REPORTED if (v := version_of(name)) is not None}
    if not have_apex():
        found.pop("apex", None)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def check_versions() -> None:
    """Refuse an environment in which the hooks of megasink do not fit.

    Raises:
        UserError: Python below 3.12, or a package that is missing or outside the tested range.
    """
    if sys.version_info < (3, 12):  # noqa: UP036  (run from a checkout, pip has not checked)
        raise UserError(
            f"Python {sys.version.split()[0]} is too old: megatron-core 0.19 needs 3.12"
        )
    for package, (lowest, below) in SUPPORTED.items():
        found = version_of(package)
        wanted = f">={'.'.join(map(str, lowest))}"
        wanted += f",<{'.'.join(map(str, below))}" if below else ""
        if found is None:
            raise UserError(f"{package} is not installed: pip install '{package}{wanted}'")
        if _numbers(found) < lowest or (below and _numbers(found) >= below):
            raise UserError(f"{package} {found} is not supported: pip install '{package}{wanted}'")


def have_transformer_engine() -> bool:
    """Whether TransformerEngine can be imported (its modules need CUDA besides)."""
    return importlib.util.find_spec("transformer_engine") is not None


def have_apex() -> bool:
    """Whether NVIDIA's apex is there: the package of that name on PyPI is another one."""
    return importlib.util.find_spec("apex") is not None and (
        importlib.util.find_spec("amp_C") is not None
    )


def mend_upstream() -> None:
    """Mend the defects of megatron-core 0.19 that stand in the way on every platform. Idempotent.

    - megatron/core/datasets/utils.py:22 compile_helpers runs ``make`` in a folder whose Makefile
      the wheel does not ship, and exits the process. The extension is in the wheel, already
      built: the call becomes a check that it imports.
    - megatron/core/optimizer/distrib_optimizer.py:337 numbers the parameters of a group in the
      order of the gradient buffers, but line 487 hands them to the inner optimizer float32 first.
      Under bf16 a group that holds float32 parameters too (our sinks) then saves and loads the
      optimizer states of other parameters: they are numbered float32 first here.
    - megatron/core/optimizer/optimizer.py:1149 saves the state of a bf16 model's optimizer as if
      no parameter were float32: with our sinks it fails, or mixes parameters up. While it saves
      and loads, the float32 parameters are shown to it as main parameters of their own.
    - megatron/core/optimizer/distrib_optimizer.py:838,1025: without TransformerEngine and apex the
      distributed optimizer's checkpoints do not load; `GroupStepAdam` takes FusedAdam's place.
    - megatron/core/optimizer/optimizer.py:1573 loads a checkpoint of one optimizer only into one,
      but with expert parallelism a model has two, one of them for the experts: the settings of
      their parameter groups are taken from those of the other arrangement.

    Raises:
        UserError: the extension cannot be imported.
    """
    from megatron.core.datasets import utils

    from megasink.platform.megatron_core import install_optimizer

    utils.compile_helpers = _check_dataset_helpers
    install_optimizer()
    _number_float32_first()
    _save_float32_too()
    _load_other_expert_parallelism()


def _check_dataset_helpers() -> None:
    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"megatron-core's dataset helpers do not import ({error}): reinstall the wheel with "
            "pip install --force-reinstall --no-deps megatron-core"
        ) from error


def mend_signal_handler(told: Callable[[], int], tell: Callable[[int], None]) -> None:
    """Ask all ranks at once which signal told one of them to end. Imports megatron.training.

    megatron/training/dist_signal_handler.py:24 gathers a tensor from each rank after every step
    and reads them one by one, waiting for the device each time: with thousands of ranks that takes
    longer than the statistics of the heads. One all-reduce of one number says the same, and which
    signal it was: upstream's handler knows one signal, that of --exit-signal.

    Args:
        told: the signal that this rank got; 0: none.
        tell: called with the signal that any rank got.
    """
    import torch
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    def signals_received(self: Any) -> list[int]:
        own = max(told(), int(self.sig) if self._signal_received else 0)
        found = torch.tensor([own], dtype=torch.int32, device=torch.cuda.current_device())
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        number = int(found.item())
        if number:
            tell(number)
        return [number]

    DistributedSignalHandler.signals_received = signals_received


def _number_float32_first() -> None:
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    upstream = DistributedOptimizer._build_optimizer_group_ranges
    if getattr(upstream, "numbers_float32_first", False):
        return

    def build(param_groups: Any, gbuf_ranges: Any) -> tuple[dict[Any, tuple[int, int]], Any]:
        _, group_ranges = upstream(param_groups, gbuf_ranges)
        positions = {}
        for index, group in enumerate(group_ranges):
            group["params"].sort(key=lambda p: p.dtype is not torch.float32)  # stable
            for order, parameter in enumerate(group["params"]):
                positions[parameter] = (index, order)
        return positions, group_ranges

    build.numbers_float32_first = True  # type: ignore[attr-defined]
    DistributedOptimizer._build_optimizer_group_ranges = staticmethod(build)


def _save_float32_too() -> None:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as Float16

    for name in ("state_dict", "sharded_state_dict", "load_state_dict"):
        method = getattr(Float16, name)
        if not hasattr(method, "__wrapped__"):
            setattr(Float16, name, _with_every_parameter(method))


def _with_every_parameter(method: Callable[..., Any]) -> Callable[..., Any]:
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


def _load_other_expert_parallelism() -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    upstream = ChainedOptimizer.load_state_dict
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def load(self: Any, state: Any) -> None:
        own = [optimizer.param_groups for optimizer in self.chained_optimizers]
        upstream(self, for_optimizers(state, own) if isinstance(state, dict) else state)

    ChainedOptimizer.load_state_dict = load


def for_optimizers(state: dict[Any, Any], own: list[list[dict[str, Any]]]) -> dict[Any, Any]:
    """The loaded state of one optimizer for several, or of several for one.

    A distributed checkpoint puts the tensors where the model that loads has them; what is common
    to all ranks, the settings of the parameter groups, comes as it was saved: for several
    optimizers under their numbers 0, 1, ..., for one beside the tensors.

    Args:
        state: as megatron.core.dist_checkpointing loads it; not changed.
        own: the parameter groups of each optimizer of the model that loads.

    Returns:
        the state, under the numbers of several optimizers or without them, as the model has them.
    """
    numbered = {key: piece for key, piece in state.items() if isinstance(key, int)}
    whole = {key: piece for key, piece in state.items() if not isinstance(key, int)}
    if not numbered or not whole:
        return state  # saved with as many optimizers as there are now
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
    """The state of one optimizer with the saved settings of its groups; experts have no others."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    keys = [key for key in param_group_identifier_keys if key != "is_expert_parallel"]
    inner = piece.get("optimizer", {}) if nested else piece
    # Where the tensors are sharded by parameter these numbers say which belong to a group.
    numbers = inner.get("param_groups", [{}] * len(own))
    groups = []
    for mine, number in zip(own, numbers, strict=True):
        same = (g for g in saved if all(g.get(key) == mine.get(key) for key in keys))
        # Without any upstream says which group is missing.
        for group in itertools.islice(same, 1):
            expert = {"is_expert_parallel": mine["is_expert_parallel"]}
            groups.append(group | expert | number)
    inner = inner | {"param_groups": groups}
    return piece | {"optimizer": inner} if nested else inner
