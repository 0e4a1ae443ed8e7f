"""Launches of Triton kernels, recorded instead of run, and compiled without a GPU."""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    int: "i32",
    float: "fp32",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture."""

    asm: dict[str, Any]
    shared: int

    @cached_property
    def usage(self) -> dict[str, int]:
        """REG, STACK, LOCAL and others, as the assembler counts them."""
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        folder = Path(triton.knobs.cache.dir)
        folder.mkdir(parents=True, exist_ok=True)
        binary = folder / "kernel.cubin"
        binary.write_bytes(self.asm["cubin"])
        command = [tools / "cuobjdump", "--dump-resource-usage", binary]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}

    @cached_property
    def accesses(self) -> Counter[tuple[str, int]]:
        """(load or store, bytes of each instruction) of global memory."""
        found = re.findall(r"(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)", self.asm["ptx"])
        return Counter((kind, int(many or 1) * int(bits) // 8) for kind, many, bits in found)


class Recorder:
    """Takes a kernel's place: `kernel[grid](...)` records its arguments."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.launches: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
            assert given.keys() == set(self.kernel.arg_names)
            self.launches.append((grid, given, options))

        return launch

    def compile(self, capability: int) -> Compiled:
        """The last launch's kernel, as Triton would compile it for these arguments."""
        _, given, options = self.launches[-1]
        signature: dict[str, str] = {}
        constants, attributes = {}, {}
        for index, (name, value) in enumerate(given.items()):
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value)
            constant = value is None or self.kernel.params[index].is_constexpr
            signature[name] = "constexpr" if constant else TYPES[kind]
            if constant:
                constants[name] = value
            elif isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                # No value of an integer is compiled in.
                assert kind is not int or self.kernel.params[index].do_not_specialize
        source = ASTSource(self.kernel.jitted, signature, constants, attributes)
        compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
        return Compiled(compiled.asm, compiled.metadata.shared)
