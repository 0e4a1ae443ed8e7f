"""Versions present, upstream defects mended, one clear error for each missing part."""

import functools
import importlib.metadata
import importlib.util
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

    Raises:
        UserError: the extension cannot be imported.
    """
    from megatron.core.datasets import utils

    from megasink.platform.megatron_core import install_optimizer

    utils.compile_helpers = _check_dataset_helpers
    install_optimizer()
    _number_float32_first()
    _save_float32_too()


def _check_dataset_helpers() -> None:
    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"megatron-core's dataset helpers do not import ({error}): reinstall the wheel with "
            "pip install --force-reinstall --no-deps megatron-core"
        ) from error


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
