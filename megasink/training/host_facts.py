"""What a host trains with, in short facts that another host compares with its own."""

import hashlib
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import megasink
from megasink import plugins
from megasink.checkpoints.find import newest_checkpoint
from megasink.checkpoints.identity import plain
from megasink.checkpoints.intact import checkpoint_path
from megasink.checkpoints.tokenizer import digests
from megasink.data.object_store import is_stored
from megasink.megatron_flags import having
from megasink.training.checks.blends import blends
from megasink.upstream.versions import versions

# What differs between ranks, and folders: `hosts` looks for those that all hosts share.
_OF_A_HOST = {"rank", "local_rank", "flag_problems", "refused_flags", "run_dir", *having("host")}
_OF_A_HOST |= {"expanded_recipe"}  # its path; its flags are compared
# Variables that choose kernels or their arithmetic.
_VARIABLES = ("NVTE_", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32")
_DIGEST = "sha256 "
_SAMPLES = 1024  # blocks that are read of all data sets, at least 4 of a file
_BLOCK = 1 << 12
_THREADS = 16


def facts_of(args: Namespace) -> dict[str, str]:
    """Return {what: its value, or a digest of it}, by the names that a message gives them.

    Reads the source of megasink, Megatron and the plugins, the tokenizer, and a few blocks of each
    data set. Paths may differ between hosts, what is behind them may not.

    Args:
        args: validated.
    """
    prefixes = [prefix for blend in blends(args) for prefix in blend.prefixes]
    facts = dict(_flags(args, set(prefixes)))
    facts |= {f"version of {name}": version for name, version in versions().items()}
    facts["version of megasink"] = megasink.__version__
    facts |= {f"variable {k}": v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    ours = Path(megasink.__file__).parent
    files = (path for kind in ("py", "toml", "json") for path in ours.rglob(f"*.{kind}"))
    facts |= {str(path.relative_to(ours.parent)): _digest([path]) for path in files}
    for package in ("megatron.core", "megatron.training"):
        facts[f"the source of {package}"] = _source(package)
    for plugin in plugins.LOADED.values():
        facts[f"the source of {plugins.FLAG} {plugin.module}"] = _source(plugin.module)
    if args.tokenizer_model and Path(args.tokenizer_model).is_dir():
        for name, digest in digests(Path(args.tokenizer_model)).items():
            facts[f"{name} of --tokenizer-model"] = _DIGEST + digest
    if args.load:
        facts["--load"] = _checkpoint(Path(args.load))
    return facts | dict(_data(args, len(prefixes)))


def differences(here: Mapping[str, str], there: Mapping[str, str], host: str) -> list[str]:
    """Describe how the facts of this host differ from those of `host`; given flags come first."""
    given = {word.partition("=")[0] for word in sys.argv}
    names = sorted({*here, *there}, key=lambda name: (name not in given, name))

    def sentence(name: str) -> str:
        mine, its = (facts.get(name, "unset") for facts in (here, there))
        if _DIGEST in mine + its:
            missing = " is missing" if name not in here else ""
            return f"{name}{missing or f' is another than on {host}'}"
        return f"{name} {mine} ({host}: {its})"

    return [sentence(name) for name in names if here.get(name) != there.get(name)]


def _flags(args: Namespace, prefixes: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the resolved flags; a file that one names counts by what is in it."""
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


def _checkpoint(folder: Path) -> str:
    newest = newest_checkpoint(folder)
    if newest is None:
        return "none"
    return _digest(sorted(checkpoint_path(folder, newest).glob("*metadata*")))


def _data(args: Namespace, count: int) -> Iterator[tuple[str, str]]:
    """Yield the files of the data sets, by a few blocks of each: most have gigabytes."""
    blocks = max(4, min(64, _SAMPLES // max(count, 1)))
    names, paths = [], []
    for blend in blends(args):
        for number, prefix in enumerate(blend.prefixes, 1):
            for kind in (".idx", ".bin") if not is_stored(prefix) else ():
                names.append(f"the {kind} of data set {number} of {blend.flag}")
                paths.append(Path(f"{prefix}{kind}"))
    with ThreadPoolExecutor(_THREADS) as threads:
        samples = threads.map(lambda path: _sampled(path, blocks), paths)
        yield from zip(names, samples, strict=True)


def _sampled(path: Path, blocks: int) -> str:
    if not path.is_file():
        return "none"
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(blocks):
            file.seek(max(0, size - _BLOCK) * number // (blocks - 1))
            digest.update(file.read(_BLOCK))
    return _DIGEST + digest.hexdigest()


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return _DIGEST + digest.hexdigest()[:16]
