"""Tasks: activating and deactivating the platform, and what it makes of tensors."""

import logging
import os
import sys
from typing import Any


def roundtrip() -> dict[str, Any]:
    """Activate, remember what was replaced, deactivate, look again."""
    import torch

    from megasink import cpu
    from megasink.upstream.patch_register import active

    def state() -> dict[str, Any]:
        return {
            "zeros": torch.zeros,
            "to": torch.Tensor.to,
            "type": torch.Tensor.type,
            "cuda": torch.cuda.is_available(),
            "dynamo": torch._dynamo.config.disable,
            "environment": os.environ.get("TORCHDYNAMO_DISABLE"),
            "loader": torch.utils.data.DataLoader,
            "warnings": len(logging.getLogger("megatron.core.tensor_parallel.random").filters),
        }

    before = state()
    cpu.activate()
    during = state()
    said = cpu.is_active(), cpu.describe()
    replaced = active("platform")
    in_force = all(getattr(r.owner, r.name) == r.replacement for r in replaced)
    cpu.activate()  # again: nothing is replaced twice
    count = len(active())
    cpu.deactivate()
    after = state()
    return {
        "unchanged": [key for key in before if before[key] == during[key]],
        "active": said,
        "replaced": in_force,
        "idempotent": count == len(replaced),
        "restored": all(
            getattr(r.owner, r.name) is r.original or r.name not in vars(r.owner) for r in replaced
        ),
        "not restored": [key for key in before if before[key] != after[key]],
        "inactive": (cpu.is_active(), active(), cpu.describe()),
    }


def too_late() -> str:
    """The refusal to activate after megatron was imported; "" if there is none."""
    from types import ModuleType
    from unittest import mock

    from megasink import cpu
    from tests.said import said

    name = "megatron.core.tensor_parallel.random"
    with mock.patch.dict(sys.modules, {name: ModuleType(name)}):
        return said(cpu.activate)


def with_cuda() -> tuple[str, int]:
    """The refusal to activate where a CUDA device is, and how much was replaced before it."""
    import torch

    from megasink import cpu
    from megasink.upstream.patch_register import active
    from tests.said import said

    torch.cuda.is_available = lambda: True
    return said(cpu.activate), len(active())


def messages(batched: bool) -> dict[str, list[int]]:
    """Shapes of what a stage gets from another one that is before and behind it, as in a step of
    an interleaved pipeline: its output, and the gradient of its input."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    config = ModelParallelConfig(variable_seq_lengths=True, pipeline_dtype=torch.float32)
    config.batch_p2p_comm = batched
    stages = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
    rank = torch.distributed.get_rank()
    output, gradient = torch.zeros(10 + rank, 1, 4), torch.zeros(20 + rank, 1, 4)
    previous, behind = stages.send_forward_backward_recv_forward_backward(
        output, gradient, recv_prev=True, recv_next=True, tensor_shape=(1, 1, 4)
    )
    return {"previous": list(previous.shape), "next": list(behind.shape)}


def devices() -> dict[str, Any]:
    """Where tensors asked for on CUDA are made, by each way to ask."""
    import torch

    from megasink import cpu

    cpu.activate()
    like = torch.ones(2)
    made = {
        "string": torch.zeros(2, device="cuda"),
        "index": torch.zeros(2, device=torch.cuda.current_device()),
        "device": torch.zeros(2, device=torch.device("cuda", 0)),
        "pinned": torch.empty(2, pin_memory=True),
        "to string": like.to("cuda"),
        "to index": like.to(0),
        "to keyword": like.to(device="cuda", dtype=torch.float64),
        "to dtype": like.to(torch.float64),
        "to other": like.to(torch.ones(1, dtype=torch.float64)),
        "cuda": like.cuda(non_blocking=True),
        "module": torch.nn.Linear(1, 1).cuda().weight,
        "module to": torch.nn.Linear(1, 1).to("cuda").weight,
    }
    return {
        "devices": {name: tensor.device.type for name, tensor in made.items()},
        "dtypes": {n: str(t.dtype) for n, t in made.items() if n.startswith("to ")},
        "meta": torch.zeros(2, device="meta").device.type,
        "type": like.type(),
        "type of bf16": like.bfloat16().type(),
        "type to": str(like.type(torch.float64).dtype),
        "type to name": str(like.type("torch.cuda.DoubleTensor").dtype),
    }


def fork_warnings() -> tuple[int, int]:
    """How often Megatron warns in one step with dropout, with the platform's filter and without."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.tensor_parallel import random

    from tests.distributed import tiny_gpt

    logger = logging.getLogger(random.__name__)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    filters, level, counts = list(logger.filters), logger.level, []
    logger.setLevel(logging.WARNING)  # an earlier task may have made Megatron quiet
    try:
        for active in (filters, []):
            logger.filters[:] = active
            records.clear()
            unset_num_microbatches_calculator()
            tiny_gpt.train(steps=1, hidden_dropout=0.2, sequence_parallel=True)
            counts.append(sum("CPU RNG state changed" in r.getMessage() for r in records))
    finally:
        logger.filters[:] = filters
        logger.setLevel(level)
        logger.removeHandler(handler)
    return counts[0], counts[1]


def generators() -> dict[str, Any]:
    """Generators asked for on CUDA, and what is made where CUDA is the default device."""
    import copy
    import pickle

    import torch

    from megasink import cpu

    cpu.activate()
    first, second = torch.Generator(device="cuda"), torch.Generator("cuda:0")
    made = [first, second]
    with torch.device("cuda"):
        made.append(torch.randn(2))
    torch.set_default_device("cuda")
    try:
        made.append(torch.ones(2))
    finally:
        torch.set_default_device(None)
    draws = [torch.randn(3, generator=g.manual_seed(3), device="cuda") for g in (first, second)]
    others = [torch.default_generator, copy.copy(first), pickle.loads(pickle.dumps(first))]
    return {
        "devices": [thing.device.type for thing in made],
        "kept": all(isinstance(g, torch.Generator) for g in (first, second, *others)),
        "drawn": [draw.tolist() for draw in draws],
    }


def tracked_draws() -> list[list[float]]:
    """What Megatron's tracker draws, without and with states that CUDA graphs may hold."""
    import torch
    from megatron.core.tensor_parallel import random

    found = []
    for graph_safe in (False, True):
        tracker = random.CudaRNGStatesTracker(use_cudagraphable_rng=graph_safe)
        torch.cuda.manual_seed(1)
        tracker.add("a", 5)
        tracker.add("b", 6)
        drawn = [torch.rand(1)]
        with tracker.fork("a"):
            drawn.append(torch.rand(1, device="cuda"))
            with tracker.fork("b"):
                drawn.append(torch.rand(1))
            drawn.append(torch.rand(1))
        drawn.append(torch.rand(1))
        with tracker.fork("a"):
            drawn.append(torch.rand(1))
        # As a checkpoint keeps them, and back.
        kept = {n: random.convert_cuda_rng_state(s) for n, s in tracker.get_states().items()}
        assert all(isinstance(state, torch.Tensor) for state in kept.values())
        states = {n: random.convert_cuda_rng_state(s, graph_safe) for n, s in kept.items()}
        tracker.set_states(states)
        with tracker.fork("b"):
            drawn.append(torch.rand(1))
        found.append([float(value) for value in drawn])
    return found
