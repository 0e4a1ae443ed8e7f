"""Packages of CUDA kernels replaced by their stand-ins of upstream_kernels.py."""

import sys
import types

import torch

from megasink.attention.kernels import backend_named, forget_choices
from tests.attention import upstream_engine, upstream_kernels


def install(monkeypatch, modules):
    """Puts modules, given as name -> attributes, where `import` finds them, parents included."""
    for name, attributes in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        for attribute, value in attributes.items():
            setattr(sys.modules[name], attribute, value)


STAND_INS = {
    "flash-attn-4": upstream_kernels.FlashAttention4,
    "flash-attn-3": upstream_kernels.FlashAttention3,
    "flash-attn-2": upstream_kernels.FlashAttention2,
    "transformer-engine": upstream_engine.TransformerEngine,
}


def stand_in_packages(monkeypatch, *names):
    """The packages of these backends are stand-ins, and the others cannot be imported."""
    for name, stand_in in STAND_INS.items():
        module = backend_named(name).module
        if name in names:
            public = [n for n in vars(stand_in) if not n.startswith("__")]
            attributes = {n: getattr(stand_in, n) for n in public}
            install(monkeypatch, {module: attributes})
        else:
            monkeypatch.setitem(sys.modules, module, None)
    forget_choices()


def stand_in_for(monkeypatch, name):
    """Make a backend whose package is a stand-in willing to run on a CPU, and return it."""
    stand_in_packages(monkeypatch, name)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    backend = backend_named(name)
    monkeypatch.setattr(type(backend), "supports", lambda *_: None)
    return backend
