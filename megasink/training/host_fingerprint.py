"""A fingerprint of this host's software, flags and data, for comparison with another host's."""

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import megasink
from megasink import plugins
from megasink.checkpoints.damage import checkpoint_path
from megasink.checkpoints.find import newest_checkpoint
from megasink.checkpoints.model_arguments import plain
from megasink.checkpoints.run_tokenizer import digests
from megasink.console.printable import say
from megasink.data.dataset_files import WHOLE, contents, is_stored
from megasink.options.megatron_flags import having
from megasink.training.dataset_blends import blends
from megasink.upstream.versions import versions

# Flags that differ between ranks, and folders: `hosts` checks those that all hosts share.
_OF_A_HOST = {"rank", "local_rank", "flag_problems", "refused_flags", "run_dir", *having("host")}
_OF_A_HOST |= {"expanded_recipe"}  # its path; its flags are compared
# Variables that choose kernels, their arithmetic, or the form of collectives.
_VARIABLES = (
    *("NVTE_", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32"),
    *("NCCL_ALGO", "NCCL_PROTO", "TORCHINDUCTOR_", "TRITON_INTERPRET", "FLA_"),
)
# Packages besides those that a run records: compiled code and its libraries.
_PACKAGES = ("nvidia-", "triton", "pytorch-triton", "torch", "cuda-", "flash-linear-attention")
_TOTAL = 4 << 30  # bytes of data to read at a start
_THREADS = 16


def facts_of(args: Namespace) -> dict[str, str]:
    """Return {name in messages: a value, or a digest}; contents count, and paths do not."""
    ours = Path(megasink.__file__).parent
    files = (path for kind in ("py", "toml", "json") for path in ours.rglob(f"*.{kind}"))
    facts = {str(path.relative_to(ours.parent)): _digest([path]) for path in files}
    facts |= {f"variable {k}": v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    for name, version in _versions():
        facts.setdefault(f"version of {name}", version)  # the first is imported
    for package in ("megatron.core", "megatron.training"):
        facts[f"the source of {package}"] = _source(package)
    for plugin in plugins.LOADED.values():
        facts[f"the source of {plugins.FLAG} {plugin.module}"] = _source(plugin.module)
    facts |= {f"the source of module {name}": _digest([path]) for name, path in _own_modules()}
    if args.tokenizer_model and Path(args.tokenizer_model).is_dir():
        for name, digest in digests(Path(args.tokenizer_model)).items():
            facts[f"{name} of --tokenizer-model"] = f"sha256 {digest[:16]}"
    if args.load:
        facts |= _checkpoint(Path(args.load))
    return facts | dict(_flags(args)) | _data(args)


def differences(here: Mapping[str, str], there: Mapping[str, str], host: str) -> list[str]:
    """Describe the differences between this host's facts and `host`'s; given flags come first."""
    given = {word.partition("=")[0] for word in sys.argv}
    names = sorted({*here, *there}, key=lambda name: (name not in given, name))
    return [
        f"{name} {here.get(name, 'missing')} ({host}: {there.get(name, 'missing')})"
        for name in names
        if here.get(name) != there.get(name)
    ]


def _versions() -> Iterator[tuple[str, str]]:
    yield from versions().items()
    yield "megasink", megasink.__version__
    for package in importlib.metadata.distributions():
        if (name := package.name.lower().replace("_", "-")).startswith(_PACKAGES):
            yield name, package.version
    # System libraries, as in images with a torch that is not from PyPI.
    yield "CUDA in torch", str(torch.version.cuda or torch.version.hip)
    if torch.distributed.is_nccl_available():
        yield "NCCL in torch", ".".join(map(str, torch.cuda.nccl.version()))


def _flags(args: Namespace) -> Iterator[tuple[str, str]]:
    """Yield the resolved flags; a file counts by its contents."""
    prefixes = {prefix for blend in blends(args) for prefix in blend.prefixes}
    for name, value in vars(args).items():
        if name in _OF_A_HOST:
            continue
        words = value if isinstance(value, list | tuple) else [value]
        text = " ".join(str(plain(word)) for word in words if word not in prefixes)
        if isinstance(value, str) and Path(value).is_file():
            text = _digest([Path(value)])
        if " at 0x" not in text:  # an object's address
            yield f"--{name.replace('_', '-')}", text


def _source(module: str) -> str:
    """Return the digest of a module, or of all modules of a package."""
    spec = importlib.util.find_spec(module)
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        return "unknown"
    if not spec.submodule_search_locations:
        return _digest([Path(str(spec.origin))])
    folders = map(Path, spec.submodule_search_locations)
    return _digest(path for folder in folders for path in sorted(folder.rglob("*.py")))


def _own_modules() -> Iterator[tuple[str, Path]]:
    """Yield the imported modules outside installed packages: a plugin's, a script."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    packages = tuple(f"{path}{os.sep}" for path in (*installed, Path(megasink.__file__).parent))
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not path.startswith(packages) and Path(path).is_file():
            yield name, Path(path)


def _checkpoint(folder: Path) -> dict[str, str]:
    """Return the metadata of the newest checkpoint, and the names and sizes of its files."""
    newest = newest_checkpoint(folder)
    if newest is None:
        return {"--load": "none"}
    paths = sorted(p for p in checkpoint_path(folder, newest).rglob("*") if p.is_file())
    sizes = " ".join(f"{path.name} {path.stat().st_size}" for path in paths)
    digest = _digest([path for path in paths if "metadata" in path.name], sizes)
    return {"--load": f"step {newest}, {len(paths)} files, {digest}"}


def _data(args: Namespace) -> dict[str, str]:
    """Return the contents of the data sets; for large ones samples, with a note."""
    files = {
        f"the {kind} of data set {number} of {blend.flag.split()[0]}": (prefix, kind)
        for blend in blends(args)
        for number, prefix in enumerate(blend.prefixes, 1)
        for kind in ((".idx", ".bin") if not is_stored(prefix) else ())
    }
    most = max(WHOLE, _TOTAL // max(1, len(files)))

    def described(file: tuple[str, str]) -> tuple[str, bool]:
        return contents(*file, most) if Path("".join(file)).is_file() else ("missing", True)

    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(described, files.values()))
    if args.rank == 0 and (large := sum(not whole for _, whole in found)):
        say(
            f"data: {large} of {len(files)} files are above {most / 1e6:,.0f} MB: the hosts "
            "compare samples of them and the checksums in PREFIX.json, and may miss differences"
        )
    return {name: text for name, (text, _) in zip(files, found, strict=True)}


def _digest(paths: Iterable[Path], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return f"sha256 {digest.hexdigest()[:16]}"
