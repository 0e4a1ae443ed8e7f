"""Task: functions of torch that take a device, asked for CUDA with the replacement and without.

Scenarios of upstream code (scenarios.py) call few of them; whoever writes a model calls the others.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from megasink import cpu
from megasink.cpu import cuda_api, cuda_tensors
from megasink.upstream.patch_register import active

_INDICES = torch.tensor([[0, 1], [0, 1]])
_POINTERS, _COLUMNS, _BLOCK = torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 1, 1)
_LIKE = torch.ones(2)
# What a factory is called with before its device; (2,) where it is not here.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "as_nested_tensor": ([_LIKE],),
    "as_tensor": ([1.0],),
    "asarray": ([1.0],),
    "empty_permuted": ((2,), (0,)),
    "empty_quantized": ((2,), torch.quantize_per_tensor(_LIKE, 0.1, 0, torch.qint8)),
    "empty_strided": ((2,), (1,)),
    "full": ((2,), 1.0),
    "full_like": (_LIKE, 1.0),
    "linspace": (0, 1, 2),
    "logspace": (0, 1, 2),
    "nested_tensor": ([_LIKE],),
    "new_empty_strided": ((2,), (1,)),
    "new_full": ((2,), 1.0),
    "normal": (0.0, 1.0, (2,)),
    "randint": (5, (2,)),
    "randint_like": (_LIKE, 5),
    "range": (0, 2),
    "scalar_tensor": (1.0,),
    "sparse_bsc_tensor": (_POINTERS, _COLUMNS, _BLOCK, (1, 1)),
    "sparse_bsr_tensor": (_POINTERS, _COLUMNS, _BLOCK, (1, 1)),
    "sparse_compressed_tensor": (_POINTERS, _COLUMNS, _LIKE[:1], (1, 1)),
    "sparse_coo_tensor": (_INDICES, _LIKE, (2, 2)),
    "sparse_csc_tensor": (_POINTERS, _COLUMNS, _LIKE[:1], (1, 1)),
    "sparse_csr_tensor": (_POINTERS, _COLUMNS, _LIKE[:1], (1, 1)),
    "tril_indices": (2, 2),
    "triu_indices": (2, 2),
    **dict.fromkeys(("empty_like", "ones_like", "rand_like", "randn_like", "zeros_like"), (_LIKE,)),
    **dict.fromkeys(
        (
            "arange eye bartlett_window blackman_window hamming_window hann_window kaiser_window "
            "randperm fftfreq rfftfreq"
        ).split(),
        (2,),
    ),
}


def both() -> tuple[dict[str, tuple[str, str]], list[str]]:
    """What the two functions below return."""
    return with_and_without(), takes_a_device()


def with_and_without() -> dict[str, tuple[str, str]]:
    """{replacement: (what it answers, what torch does without it)}."""
    cpu.activate()
    found = {}
    for replacement in active("platform"):
        call = call_of(replacement)
        if call is not None:
            there = _answer(call)
            replacement.undo()
            found[replacement.target] = there, _answer(call)
            replacement.redo()
    return found


def call_of(patch: Any) -> Callable[[], str] | None:
    """A call of what was replaced; None where it is nothing of this kind."""
    return _factory(patch) or _random(patch)


def takes_a_device() -> list[str]:
    """Public functions of torch and methods of tensors whose schema has a device."""
    names = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any(a.name == "device" for a in schema.arguments)
    }
    # These have schemas of their own.
    names |= {function.__name__ for function in torch.utils._device._device_constructors()}
    found = {f"torch.{name}" for name in names if hasattr(torch, name)}
    found |= {f"Tensor.{name}" for name in names if hasattr(torch.Tensor, name)}
    return sorted(name for name in found if not name.split(".")[1].startswith("_"))


def _factory(patch: Any) -> Callable[[], str] | None:
    if (patch.owner, patch.name) not in cuda_tensors.FACTORIES:
        return None
    arguments = _ARGUMENTS.get(patch.name, ((2,),))

    def call() -> str:
        function, options = getattr(patch.owner, patch.name), {"device": "cuda"}
        if patch.owner is torch.Tensor:
            return str(function(_LIKE, *arguments, **options).device)
        if patch.name == "from_file":
            with tempfile.NamedTemporaryFile(buffering=0) as file:
                file.write(bytes(8))
                return str(function(file.name, size=2, **options).device)
        if patch.name.startswith("sparse_compressed"):
            options["layout"] = torch.sparse_csr
        return str(function(*arguments, **options).device)

    return call


def _random(patch: Any) -> Callable[[], str] | None:
    if patch.owner not in (torch.cuda, torch.cuda.random) or patch.name not in cuda_api.RANDOM:
        return None
    other = torch.Generator().manual_seed(7).get_state()
    arguments: dict[str, tuple[Any, ...]] = {
        "set_rng_state": (other,),
        "manual_seed": (7,),
        "manual_seed_all": (7,),
    }

    def call() -> str:
        torch.default_generator.manual_seed(5)
        result = getattr(patch.owner, patch.name)(*arguments.get(patch.name, ()))
        result = result[0] if isinstance(result, list) else result
        if result is not None:
            same = result == 5 if isinstance(result, int) else _is_state(result, 5)
            return f"read: {same}"
        if patch.name.startswith("seed"):
            return f"seeded: {torch.default_generator.initial_seed() != 5}"
        return f"seeded: {_is_state(torch.default_generator.get_state(), 7)}"

    return call


def _is_state(state: torch.Tensor, seed: int) -> bool:
    return torch.equal(state, torch.Generator().manual_seed(seed).get_state())


def _answer(call: Callable[[], str]) -> str:
    try:
        return call()
    except Exception as error:
        return type(error).__name__
