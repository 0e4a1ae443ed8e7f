"""What is installed, by the requirements in megasink's own metadata; nothing is imported."""

import importlib.metadata
from dataclasses import dataclass

from packaging.requirements import Requirement

from megasink.upstream.versions import version_of

# What they are for is in pyproject.toml.
EXTRAS = ("train", "gpu", "finetune", "muon", "eval", "eval-long", "storage")
BASE = ""


@dataclass(frozen=True)
class Package:
    """A requirement of megasink or of one of its extras.

    Attributes:
        name: Name on PyPI.
        extra: The extra that asks for it; "" for `pip install megasink`.
        supported: Versions as pip writes them, such as ">=2.11"; "" for any.
        installed: The installed version, or None.
    """

    name: str
    extra: str
    supported: str
    installed: str | None

    @property
    def is_outside(self) -> bool:
        """Whether a version is installed that is not supported."""
        return self.installed is not None and not Requirement(
            self.name + self.supported
        ).specifier.contains(self.installed, prereleases=True)

    @property
    def install(self) -> str:
        """The command that mends it alone."""
        return f"pip install '{self.name}{self.supported}'"


def packages() -> list[Package]:
    """Return what megasink and its extras require on this platform, in the order of pyproject.toml.

    Empty where megasink has no metadata: it is on the path, but not installed.
    """
    try:
        texts = importlib.metadata.requires("megasink") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found: dict[tuple[str, str], Package] = {}
    for requirement in map(Requirement, texts):
        for extra in (BASE, *EXTRAS):
            marker = requirement.marker
            # With an extra, what is required without it is true as well.
            wanted = marker is None if extra == BASE else marker is not None
            wanted &= requirement.name != "megasink"  # of one extra with another
            if wanted and (marker is None or marker.evaluate({"extra": extra})):
                name, supported = requirement.name, str(requirement.specifier)
                found[extra, name] = Package(name, extra, supported, version_of(name))
    return list(found.values())


def install_line(extra: str) -> str:
    """Return the command that installs megasink with an extra."""
    return f"pip install 'megasink[{extra}]'" if extra else "pip install megasink"
