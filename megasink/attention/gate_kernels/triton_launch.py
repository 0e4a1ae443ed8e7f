"""Launch Triton kernels again without Triton's lookup of the compiled one, most of a launch's time.

Triton asks every argument for its type and joins the answers, with the options, to a string. Here
numbers are compiled in nowhere, so that a compiled kernel is known by the types
and alignments of its tensors and by its constants. That was compared with Triton's own launches in
the releases of `COMPARED`; with others, Triton launches every kernel.
"""

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

# Names that end so are strides or sizes, which must not be compiled in.
_RUNTIME = (
    *("_b", "_h", "_t", "tokens", "heads", "batch"),
    *("per_group", "programs", "first_row", "visible", "scale"),
)
_OF_TRITON = ("num_warps", "enable_fp_fusion")  # options, not arguments of the kernel
# The upper bound is excluded; tests/plan/hollow/test_attention.py compares the installed release.
COMPARED = ((3, 6), (3, 10))


def looked_up_because() -> str | None:
    """Return why Triton looks up its kernels at every launch, or None if it need not."""
    if torch.version.hip is not None:
        return "on ROCm a compiled kernel also depends on the size of its tensors"
    oldest, below = COMPARED
    major, minor = map(int, triton.__version__.split(".")[:2])
    if not oldest <= (major, minor) < below:
        fits = ">={}.{},<{}.{}".format(*oldest, *below)
        return f"their fast launch was tested with triton{fits}, not with {triton.__version__}"
    return None


_LOOKED_UP = looked_up_because() is not None


class Kernel:
    """A Triton kernel that is launched as `kernel[grid](*arguments, **constants)`."""

    def __init__(self, function: Any):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        runtime = [n for n in names if n.endswith(_RUNTIME)]
        self.jitted: Any = triton.jit(function, do_not_specialize=runtime)
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *arguments: Any, **constants: Any) -> None:
        """Launch; constants stand in the order of the kernel's parameters."""
        kinds = tuple(map(_kind, arguments))
        if _LOOKED_UP or _WIDE in kinds or not isinstance(self.jitted, JITFunction) or _watched():
            self.jitted[grid](*arguments, **constants)
            return
        device = torch.cuda.current_device()
        known = (device, kinds, *constants.values())
        found = self._compiled.get(known)
        if found is None:
            compiled = self.jitted[grid](*arguments, **constants)
            ours = {n: value for n, value in constants.items() if n not in _OF_TRITON}
            assert [*ours] == self.jitted.arg_names[len(arguments) :], "constants out of order"
            pairs = zip(self.jitted.params, arguments, strict=False)
            numbers = [parameter for parameter, a in pairs if isinstance(a, int)]
            assert all(p.do_not_specialize for p in numbers), "a number is compiled in"
            self._compiled[known] = compiled, tuple(ours.values())
            return
        compiled, values = found
        stream = triton.runtime.driver.active.get_current_stream(device)
        program, metadata = compiled.function, compiled.packed_metadata
        compiled.run(
            grid[0], 1, 1, stream, program, metadata, None, None, None, *arguments, *values
        )


def _watched() -> bool:
    """Return whether a profiler waits for launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


_WIDE = "wide"


def _kind(argument: Any) -> Any:
    """Return what a compiled kernel depends on, as Triton decides it."""
    if isinstance(argument, Tensor):
        aligned = argument.data_ptr() % 16 == 0
        return argument.dtype if aligned else (argument.dtype,)
    if type(argument) is int and argument.bit_length() > 31:
        return _WIDE
    return type(argument)
