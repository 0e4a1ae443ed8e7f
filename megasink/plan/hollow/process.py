"""The environment of a process whose CUDA is the hollow GPU."""

import os
from dataclasses import dataclass

from megasink.plan.hollow.build import DRIVER, LIBRARY, built

_LIBRARY = "HOLLOW_LIBRARY"


@dataclass(frozen=True)
class Device:
    """The device to stand in for.

    Attributes:
        capability: Compute capability without the point: 80 for A100, 90 for H100.
        gib: Device memory; an allocation beyond it fails as on the device.
        count: Number of devices of the process.
    """

    capability: int = 80
    gib: int = 80
    count: int = 1

    def variables(self) -> dict[str, str]:
        """Return the environment variables that describe it; read when CUDA is initialized."""
        return {
            "HOLLOW_CAPABILITY": str(self.capability),
            "HOLLOW_GIB": str(self.gib),
            "HOLLOW_GPUS": str(self.count),
        }


def environment(device: Device | None = None) -> dict[str, str]:
    """Return additions to the environment of a new process.

    torch.compile is off, because it would compile its own kernels.
    """
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
