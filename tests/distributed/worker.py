"""One worker of the pool: connects, then runs tasks until the connection closes."""

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import queue
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

from tests.distributed.layout import Layout
from tests.distributed.thread_tasks import threads
from tests.forkserver import HANG_SECONDS
from tests.seeds import seed

# Shorter than the pool's own limit for a task, so that a lost rank is a traceback and not a kill.
COLLECTIVE_SECONDS = 500
# What torchrun would set, and tasks do: an analysis would share its samples with ranks of before.
TORCHRUN = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()


def main(address: str) -> None:
    """Serve tasks."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Client(address, authkey=bytes.fromhex(os.environ["POOL_KEY"]))
    with contextlib.suppress(EOFError):
        rank = pickle.loads(connection.recv_bytes())
        os.environ["POOL_RANK"] = str(rank)  # for tasks that run without a process group
        while True:
            _serve(connection, rank)


def _serve(connection: Connection, rank: int) -> None:
    task, layout, store, kwargs = pickle.loads(connection.recv_bytes())
    module, function = task.split(":")
    seed()
    try:
        if layout is None:
            result = getattr(importlib.import_module(module), function)(**kwargs)
        else:
            with parallel_state(layout, rank, store):
                result = getattr(importlib.import_module(module), function)(**kwargs)
        del kwargs
        answer = pickle.dumps((True, _plain(result)))
        del result
        _check_ended(task)
    except Exception:
        answer = pickle.dumps((False, traceback.format_exc()))
    for name in TORCHRUN:
        os.environ.pop(name, None)
    connection.send_bytes(answer)


def _check_ended(task: str) -> None:
    """Fail a task that leaves a process group: its threads would slow down every later task."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return

    def left() -> int:
        return sum(number for name, number in threads().items() if "gloo" in name)

    groups, deadline = len(c10d._world.pg_map), time.monotonic() + HANG_SECONDS / 10
    while not groups and left():  # the system lists a thread for a moment after it was joined
        assert time.monotonic() < deadline, f"{task} left {left()} threads of gloo: {threads()}"
        gc.collect()
    assert not groups, f"{task} left {groups} process groups and {left()} threads of gloo"


def _plain(value: Any) -> Any:
    """Tensors as numpy arrays: megatron changes how tensors are pickled, and reading its form
    would import megatron into the test process."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value


@contextlib.contextmanager
def parallel_state(layout: Layout, rank: int, store: str) -> Iterator[None]:
    """The process group and Megatron's parallel state of one task."""
    from megasink import cpu

    cpu.activate()
    from megasink.upstream.apply_fixes import fix_upstream  # imports Megatron

    fix_upstream()
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # As megasink.training.checkpoint_writer: in its place upstream would start a process.
    filesystem_async._results_queue = queue.Queue()
    gc.freeze()  # modules, and what earlier tasks left: the end of this one need not look at them
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=layout.world,
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )
    try:
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        yield
    finally:
        forget()


def _end_groups() -> None:
    """Destroy every process group of a task, and free the models that hold them.

    gloo's threads poll as long as a group lives. Models are cycles, and those under Megatron's DDP
    and optimizers pass through autograd nodes, which Python's collector does not see
    (core/distributed/distributed_data_parallel.py:388, views of parameters in the optimizers): so
    what a task left of them is emptied by hand.
    """
    import torch

    from megasink.megatron.process_groups import destroy_groups

    kinds = (torch.nn.Module, torch.optim.Optimizer)
    rooms = ("megatron.core.optimizer", "megatron.core.distributed")

    @functools.cache
    def holds_groups(kind: type) -> bool:
        return issubclass(kind, kinds) or str(kind.__module__).startswith(rooms)

    for found in gc.get_objects():
        if type(found).__name__ == "DeviceMesh":  # DTensor's caches keep it
            vars(found).get("_pg_registry", {}).clear()
        elif holds_groups(type(found)):
            with contextlib.suppress(TypeError):  # no attributes of its own
                vars(found).clear()
    destroy_groups()
    gc.collect()


def forget() -> None:
    """Drop what a task left in the process, and end its process groups."""
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.training.global_vars import destroy_global_vars, get_tensorboard_writer

    num_microbatches_calculator.unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    if writer := get_tensorboard_writer():
        writer.close()  # and its thread
    destroy_global_vars()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if trainer := sys.modules.get("megatron.training.training"):
        # Set by a first start, it makes the next one in this process reduce once more (training.py:
        # 1131): beside a rank that starts for the first time, it would wait for ever.
        trainer._STARTUP_TIMESTAMPS["program_start"] = None
        # Left by a step that failed, they make this rank reduce alone (training.py:372).
        trainer._seqlen_stats_active, trainer._seqlen_stats_in_iteration = False, None
    if forward := sys.modules.get("megasink.training.forward_step"):
        forward._byte_table.cache_clear()  # that of the run's tokenizer; the next has another one
    _end_groups()


def layout_of_task() -> dict[str, Any]:
    """A task: where this rank stands, as Megatron sees it."""
    from megatron.core import parallel_state as state

    return {
        "tp": state.get_tensor_model_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
        "pid": os.getpid(),
    }


if __name__ == "__main__":
    main(sys.argv[1])
