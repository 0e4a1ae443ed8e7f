"""The flag ``--device`` of every command that runs a model in its own process."""

import argparse

from megasink import cpu

# Devices of torch that megasink was never tried on.
_UNTRIED = ("mps", "xpu", "npu", "hpu")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    text = "cpu, cuda or cuda:N (default: the GPU if there is one)"
    parser.add_argument("--device", help=text)


def device_problems(name: str | None) -> list[str]:
    """Return why this machine lacks a device; imports torch if there may be a GPU."""
    if name is None:
        reason = cpu.unusable_gpu()
        return [f"{reason}; to run on the CPU instead, pass --device cpu"] if reason else []
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", *_UNTRIED) or (":" in name and not index.isdecimal()):
        return [f"--device {name}: no such device: use cpu or cuda"]
    if kind != "cuda":
        return []
    if reason := cpu.unusable_gpu(int(index or 0)):
        return [f"--device {name}: {reason}; or use cpu"]
    there = 0
    if cpu.cuda_present():
        import torch

        there = torch.cuda.device_count()
    if int(index or 0) >= there:
        use = "cuda:0" if there else "cpu"
        return [f"--device {name}: this machine has {there or 'no'} CUDA devices: use {use}"]
    return []
