"""An environment with what `pip install megasink` brings, and nothing else that is installed here.

A virtual environment with links to the files of the distributions that pyproject.toml names, and of
those that they require: what a package lacks in its requirements cannot be imported from it.
"""

import subprocess
import venv
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MACOS = {"platform_system": "Darwin", "sys_platform": "darwin", "platform_machine": "arm64"}


def required(
    names: Iterable[str], platform: Mapping[str, str] | None = None
) -> dict[str, Distribution]:
    """Return the installed distributions by name, with all that they require.

    Args:
        platform: markers of another one than this, such as `MACOS`.
    """
    found: dict[str, Distribution] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform; what is truly missing fails when it is imported
        for text in found[name].requires or ():
            inner = Requirement(text)
            known = [{**(platform or {}), "extra": extra} for extra in ("", *requirement.extras)]
            if inner.marker is None or any(inner.marker.evaluate(each) for each in known):
                waiting.append(inner)
    return found


def tops(found: Distribution) -> Iterator[str]:
    """Return the first parts of the paths of a distribution's files in site-packages."""
    yield from {file.parts[0] for file in found.files or () if file.parts[0] != ".."}


def make(folder: Path, requirements: Iterable[str]) -> Path:
    """Make an environment of the requirements, and return its folder of packages."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in required(requirements).values():
        for top in tops(found):
            source = Path(str(found.locate_file(top)))
            if source.exists() and not (packages / top).exists():
                (packages / top).symlink_to(source)
    return packages


def run(folder: Path, program: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, such as python, in its folder."""
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(folder / "bin" / program), *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=folder,
    )
