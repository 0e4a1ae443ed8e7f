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
    """Return the folder with the compiled libraries; build them first if they are missing.

    The folder is in ``$XDG_CACHE_HOME/megasink`` (``~/.cache/megasink``). Processes may build at
    the same time; one of the results stays.
    """
    compiler, headers = _compiler(), _headers()
    folder = _cache() / "hollow" / _digest(compiler, headers)
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
        raise UserError(f"the hollow GPU needs a C++ compiler, but {name} was not found")
    return compiler


@functools.cache
def _headers() -> Path:
    """Return the folder of the CUDA runtime's headers of torch's major release."""
    release = _cuda_of_torch()
    if release is None:
        raise UserError("the hollow GPU needs a CUDA build of torch, but this is a CPU build")
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
        f"they are not all in {' or '.join(map(str, places))}: pip install triton, or set CUDA_HOME"
    )


def _cuda_of_torch() -> str | None:
    """Return the CUDA release that torch is built for, without the slow import of torch."""
    spec = importlib.util.find_spec("torch")
    for place in (spec and spec.submodule_search_locations) or ():
        text = Path(place, "version.py").read_text()
        if match := re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)", text, re.M):
            return match[1]
    return None


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megasink"


def _digest(compiler: str, headers: Path) -> str:
    """Return a digest of the libraries' sources."""
    made_from = hashlib.sha256(f"{compiler} {_FLAGS}".encode())
    for path in (*sorted(_NATIVE.iterdir()), Path(__file__), *(headers / n for n in _NEEDED)):
        made_from.update(path.read_bytes())
    return made_from.hexdigest()[:16]
