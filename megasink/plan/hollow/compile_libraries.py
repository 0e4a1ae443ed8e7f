"""Compile the hollow GPU's libraries, once for each release of the CUDA headers.

It needs g++ (or ``$CXX``), a CUDA build of torch, and the runtime's headers of the same major
release, from a CUDA toolkit or from triton.
"""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megasink.errors import UserError
from megasink.files.atomic import atomic_folder

LIBRARY, DRIVER = "libhollow.so", "libcuda.so.1"
_NATIVE = Path(__file__).with_name("native")
_RUNTIME = ("device", "memory", "kernels", "blas", "collectives")
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared")
_NEEDED = ("cuda_runtime_api.h", "cuda.h", "crt/host_defines.h")


def missing() -> str | None:
    """Return why the hollow GPU cannot be built here, or None."""
    try:
        _compiler(), _headers()
    except UserError as error:
        return str(error)
    return None


@functools.cache
def built() -> Path:
    """Return the folder of the compiled libraries, built if they are missing; one build stays."""
    compiler, headers = _compiler(), _headers()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "megasink" / "hollow" / _digest(compiler, headers)
    if not (folder / DRIVER).exists():
        try:
            with atomic_folder(folder) as partial:
                _compile(compiler, headers, partial)
        except OSError as error:
            if not (folder / DRIVER).exists():  # otherwise another process was faster
                raise UserError(
                    f"the hollow GPU cannot be built in {folder.parent}: {error.strerror}; set "
                    "XDG_CACHE_HOME to a writable folder"
                ) from error
    return folder


def _compile(compiler: str, headers: Path, folder: Path) -> None:
    others = folder / "others.cpp"
    others.write_text(other_driver_functions(headers / "cuda.h", _NATIVE / "driver.cpp"))
    sources = [str(_NATIVE / f"{name}.cpp") for name in _RUNTIME]
    for target, names in (
        (LIBRARY, [f"-I{headers}", *sources]),
        (DRIVER, [f"-Wl,-soname,{DRIVER}", str(_NATIVE / "driver.cpp"), str(others)]),
    ):
        command = [compiler, *_FLAGS, "-o", str(folder / target), *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}")


def other_driver_functions(cuda_h: Path, own: Path) -> str:
    """Return C++ for every function of cuda.h that `own` does not define; each returns success."""
    declared = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\(", cuda_h.read_text()))
    declared |= {f"{name}_v2" for name in declared}
    here = set(re.findall(r"API int (cu[A-Z]\w+)\(", own.read_text()))
    return "\n".join(f'extern "C" int {name}() {{ return 0; }}' for name in sorted(declared - here))


@functools.cache
def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise UserError(f"the hollow GPU needs a C++ compiler: {name} was not found; set CXX")
    return compiler


@functools.cache
def _headers() -> Path:
    """Return the folder of the CUDA runtime's headers of torch's major release."""
    release = _cuda_of_torch()
    if release is None:
        raise UserError("the hollow GPU needs a CUDA build of torch: this is a CPU build")
    major = release.split(".")[0]
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]
    wheels = {"nvidia": f"cu{major}/include", "triton": "backends/nvidia/include"}
    for package, inside in wheels.items():
        spec = importlib.util.find_spec(package)
        places += [Path(p, inside) for p in (spec and spec.submodule_search_locations) or ()]
    for place in places:
        if all((place / name).exists() for name in _NEEDED):
            text = (place / _NEEDED[0]).read_text()
            if (match := re.search(r"#define CUDART_VERSION +(\d+)", text)) is None:
                continue
            if int(match[1]) // 1000 == int(major):
                return place
    raise UserError(
        f"the hollow GPU needs the headers of the CUDA {major} runtime ({', '.join(_NEEDED)}); "
        f"{' or '.join(map(str, places))} lacks some: pip install triton, or set CUDA_HOME"
    )


def _cuda_of_torch() -> str | None:
    """Return the CUDA release that torch is built for, without the slow import of torch."""
    spec = importlib.util.find_spec("torch")
    for place in (spec and spec.submodule_search_locations) or ():
        text = Path(place, "version.py").read_text()
        if match := re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)", text, re.M):
            return match[1]
    return None


def _digest(compiler: str, headers: Path) -> str:
    """Return a digest of the libraries' sources."""
    made_from = hashlib.sha256(f"{compiler} {_FLAGS}".encode())
    for path in (*sorted(_NATIVE.iterdir()), Path(__file__), *(headers / n for n in _NEEDED)):
        made_from.update(path.read_bytes())
    return made_from.hexdigest()[:16]


_LIBRARY = "HOLLOW_LIBRARY"


@dataclass(frozen=True)
class Device:
    """The device to stand in for."""

    capability: int = 80  # compute capability without the point: 80 for A100, 90 for H100
    gib: int = 80  # of memory; an allocation beyond it fails as on the device
    count: int = 1  # devices of the process

    def variables(self) -> dict[str, str]:
        """Return the environment variables that describe it; read when CUDA is initialized."""
        return {
            "HOLLOW_CAPABILITY": str(self.capability),
            "HOLLOW_GIB": str(self.gib),
            "HOLLOW_GPUS": str(self.count),
        }


def environment(device: Device | None = None) -> dict[str, str]:
    """Return additions to the environment of a process, in which torch.compile is off."""
    folder = built()
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_PRELOAD": str(folder / LIBRARY),
        # Where torch and triton find the driver when they load it.
        "LD_LIBRARY_PATH": f"{folder}:{before}" if before else str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "0",  # the user may have hidden all devices
        _LIBRARY: str(folder / LIBRARY),
        **(device or Device()).variables(),
    }


def library() -> str:
    """Return the path of the loaded library."""
    if _LIBRARY not in os.environ:
        raise RuntimeError(f"this process does not run on the hollow GPU ({DRIVER} is not ours)")
    return os.environ[_LIBRARY]
