"""The architectures of exports: those of transformers, and megasink's own.

Each file registers some of them, as a plugin does.
"""

import importlib
import pkgutil

from megasink.convert.targets.target import TARGETS, Target, choose, named, register

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = ["TARGETS", "Target", "choose", "named", "register"]
