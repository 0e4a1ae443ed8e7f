"""Tasks for the server: programs that `make gpu` starts, on a device that computes nothing."""

import contextlib
import importlib
import io
import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch

from megasink.plan.hollow.compile_libraries import Device

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def benchmark(name: str, flags: list[str], cudnn: int) -> tuple[int, str]:
    """The exit code and the output of a benchmark, on Hopper with a version of cuDNN."""
    os.environ |= Device(capability=90).variables()
    sys.path.insert(0, str(BENCHMARKS))
    torch.backends.cuda.enable_cudnn_sdp(False)  # the floor would take it, and it cannot start
    sys.argv, printed = [name, *flags], io.StringIO()
    with (
        mock.patch("torch.backends.cudnn.version", return_value=cudnn),
        contextlib.redirect_stdout(printed),
    ):
        return importlib.import_module(name).main(), printed.getvalue()


def layers(path: str, kinds: list[str]) -> dict[str, list[str]]:
    """{kind: names of the gradients} that tests/gpu/model_steps.py writes after two steps."""
    from tests.gpu import model_steps

    case = {"dtype": "bfloat16", "kernel": "auto", "impl": "local"}
    cases = {json.dumps({"kind": kind, **case}): kind for kind in kinds}
    sys.argv = ["model_steps", "cuda", path, *cases]
    model_steps.main()
    found: dict[str, list[str]] = {}
    for name in torch.load(path, weights_only=True):
        text, _, parameter = name.rpartition("/")
        found.setdefault(cases[text], []).append(parameter)
    return found
