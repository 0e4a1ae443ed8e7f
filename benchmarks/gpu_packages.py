"""Packages of a bare machine: which are missing, and wheels that are only unpacked."""

import importlib.util
import io
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

# Modules whose package has another name.
_PACKAGES = {
    "megatron": "megatron-core",
    "flash_attn.cute": "flash-attn-4",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
    "transformer_engine": "transformer-engine",
    "sklearn": "scikit-learn",
}
# Python reads .pth files, which some wheels need, only in its own folders.
_SITE = "import os, site\nsite.addsitedir(os.path.dirname(__file__))\n"


def missing(modules: Iterable[str]) -> dict[str, set[str]]:
    """Return {package: its modules among these} for what is not installed."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in dict.fromkeys(modules):
        if not _is_there(module):
            name = _PACKAGES.get(module, _PACKAGES.get(top := module.split(".")[0], top))
            found[name].add(module)
    return dict(found)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # of a parent, which is missing or broken
        return False


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack every wheel of a folder that is not there yet. NAME.whl.* are parts of one, in order.

    Nothing else of an installation is done: the wheels must fit this Python and each other.
    """
    parts: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(wheels.glob("*.whl*")):
        parts[path.name.partition(".whl")[0]].append(path)
    if not parts:
        raise SystemExit(f"{wheels} has no wheels: copy files NAME.whl into it")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    for name, files in parts.items():
        name, version, *_ = name.split("-")
        if (folder / f"{name}-{version}.dist-info" / "RECORD").exists():
            continue
        try:
            with zipfile.ZipFile(io.BytesIO(b"".join(map(Path.read_bytes, files)))) as wheel:
                wheel.extractall(folder)
        except zipfile.BadZipFile as error:
            listed = ", ".join(path.name for path in files)
            raise SystemExit(f"{listed}: not a whole wheel ({error}): copy it again") from error
        for scheme in ("purelib", "platlib"):
            data = folder / f"{name}-{version}.data" / scheme
            if data.is_dir():
                shutil.copytree(data, folder, dirs_exist_ok=True)
