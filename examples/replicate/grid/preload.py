"""Import what a rank and a measurement import; `start.py` forks them from the process that did.

Imports only: no thread, process group or CUDA context, which a fork would break. The process sees
no GPU, so Megatron is imported on the CPU platform.

The process ends with the grid, even on SIGKILL; multiprocessing's own
pipe does not see to that while a fork is alive, which holds its other end. The forks watch their
parent (`megasink.training.watchdog`).
"""

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import sys

from megasink.cpu.prepare_process import prepare_quietly
from megasink.training.die_with_parent import ends_with

GRID = "MEGASINK_GRID"
"""Variable with the process id of the grid; without it nothing is imported."""
ROOMS = (
    "analysis.ablate",
    "analysis.capture",
    "analysis.interventions",
    "analysis.metrics",
    "analysis.pages",
    "balance",
    "checkpoints",
    "data",
    "megatron",
    "training",
)
# What Megatron, torch and we import only when it is used.
LATE = (
    "megasink.cli",
    "megasink.cli.ablate",
    "megasink.cli.analyze",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "megatron.core.tokenizers.text.libraries",
    "megatron.training.training",
    "scipy.optimize",
    "scipy.stats",
    "sklearn.decomposition",
    "sklearn.manifold",
    "tensorboard.compat.proto.event_pb2",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


def _import_all() -> None:
    prepare_quietly(cpu=True)
    for room in ROOMS:
        package = importlib.import_module(f"megasink.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in LATE:
        with contextlib.suppress(ImportError):  # then the run that needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks share these pages
    # The end of the server is that of the grid: without this, nanobind lists the objects that
    # Triton leaves behind. Forks end by os._exit themselves, and run no such handlers.
    atexit.register(os._exit, 0)


if GRID in os.environ:
    if not ends_with(int(os.environ.pop(GRID))):
        sys.exit(1)  # the grid ended in between
    _import_all()
