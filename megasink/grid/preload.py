"""Import what a rank and a measurement import; `start.py` forks them from the process that did.

Imports only: no thread, process group or CUDA context, which a fork would break. The process sees
no GPU, so Megatron is imported on the CPU platform.
"""

import contextlib
import gc
import importlib
import pkgutil

from megasink.process import prepare_quietly

ROOMS = ("balance", "checkpoint", "data", "diagnostics", "layers", "probe", "report", "train")
# What Megatron, torch and we import only when it is used.
LATE = (
    "megasink.cli",
    "megasink.commands.analyze",
    "megasink.lora.modules",
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


_import_all()
