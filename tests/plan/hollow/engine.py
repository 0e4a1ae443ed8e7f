"""Build TransformerEngine for the hollow GPU, outside the checkout.

    python -m tests.plan.hollow.engine FOLDER      # 25 minutes of one core, 1 GB
    MEGASINK_TEST_ENGINE=FOLDER python -m pytest tests/plan/hollow/test_engine.py

Its package for torch has no wheel on PyPI. Its 33 files are compiled without optimization, against
the CUDA headers in torch's own wheels and triton's. A build that was stopped goes on.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tarfile
from importlib.util import find_spec
from pathlib import Path

from megasink.plan import hollow

RELEASE = "2.20.2"
FOLDER = os.environ.get("MEGASINK_TEST_ENGINE")
NAME = "transformer_engine_torch"
ATTENTION = Path(__file__).with_name("engine_attention.cpp")
PACKAGES = (
    *(f"transformer-engine{part}=={RELEASE}" for part in ("", "-cu13")),
    *("einops", "ml_dtypes", "nvdlfw-inspect", "onnx", "onnx_ir", "onnxscript"),
)
FLAGS = "-O0 -g0 -w -std=c++20 -fPIC -fvisibility=hidden -DTORCH_API_INCLUDE_EXTENSION_H"


def missing() -> str | None:
    """Why its tests cannot run here, or None."""
    if FOLDER is None:
        return "needs MEGASINK_TEST_ENGINE=FOLDER, built by python -m tests.plan.hollow.engine"
    for library in (Path(FOLDER, "site", f"{NAME}.so"), _attention(Path(FOLDER))):
        if not library.exists():
            return f"{library} does not exist: python -m tests.plan.hollow.engine {FOLDER}"
    return hollow.missing()


def variables() -> dict[str, str]:
    """What a process needs besides the folder `site` of its packages."""
    folder = Path(FOLDER or "")
    loaded = f"{hollow.environment()['LD_PRELOAD']}:{_attention(folder)}"
    return {"CURAND_HOME": str(folder / "curand"), "LD_PRELOAD": loaded}


def _attention(folder: Path) -> Path:
    """The library of our `engine_attention.cpp` as it is now."""
    return folder / f"attention-{hashlib.sha256(ATTENTION.read_bytes()).hexdigest()[:16]}.so"


def build(folder: Path) -> None:
    site, made = folder / "site", folder / "made"
    made.mkdir(parents=True, exist_ok=True)
    install = f"{sys.executable} -m pip install --no-deps --target"
    if not (site / "transformer_engine").exists():
        _run(f"{install} {site} {' '.join(map(shlex.quote, PACKAGES))}")
        _run(f"{install} {folder / 'curand'} nvidia-curand")
    source = made / f"{NAME}-{RELEASE}"
    if not source.exists():
        # Its metadata comes from a script that imports torch.
        only = "--no-deps --no-binary :all: --no-build-isolation"
        download = f"{sys.executable} -m pip download"
        _run(f"{download} {only} -d {made} transformer-engine-torch=={RELEASE}")
        with tarfile.open(made / f"{source.name}.tar.gz") as archive:
            archive.extractall(made, filter="data")
    torch, headers = _package("torch"), _headers(source)
    # Lazy: the functions that it calls are loaded later.
    how = f"{FLAGS} -fvisibility=default -shared -Wl,-z,lazy"
    _run(f"g++ {how} {headers} {ATTENTION} -o {_attention(folder)}")
    if (site / f"{NAME}.so").exists():
        return
    files = sorted((source / "csrc").rglob("*.cpp"))
    objects = [made / f"{number}-{file.stem}.o" for number, file in enumerate(files)]
    for file, made_of_it in zip(files, objects, strict=True):
        if not made_of_it.exists():
            print(f"compiling {file}", flush=True)
            partial = made_of_it.with_suffix(".partial")
            named = f"{FLAGS} -DTORCH_EXTENSION_NAME={NAME} {headers}"
            _run(f"g++ {named} -c {file} -o {partial}")
            partial.rename(made_of_it)
    libraries = f"-L{torch}/lib -Wl,-rpath,{torch}/lib -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda"
    libraries += " -ltorch -ltorch_python"
    _run(f"g++ -shared {' '.join(map(str, objects))} {libraries} -o {made}/{NAME}.so")
    (made / f"{NAME}.so").rename(site / f"{NAME}.so")


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _headers(source: Path) -> str:
    # In upstream's order: both `common` and `csrc` have a common.h.
    parts = ("common_headers", "common_headers/common", "common_headers/common/include", "csrc")
    places = [source / part for part in parts]
    torch, nvidia, triton = map(_package, ("torch", "nvidia", "triton"))
    places += [torch / "include", torch / "include/torch/csrc/api/include"]
    places += [nvidia / part / "include" for part in ("cu13", "cudnn", "nccl")]
    places.append(triton / "backends/nvidia/include")  # crt/
    places.append(Path(sysconfig.get_paths()["include"]))
    return " ".join(f"-I{place}" for place in places)


def _run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute())
