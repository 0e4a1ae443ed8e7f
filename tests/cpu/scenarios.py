"""Upstream code that needs the CPU platform, in one process; each public function is a scenario.

A scenario returns what a dead replacement could change without an exception, to be compared with
the answer of the whole platform.
"""

import contextlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.distributed.layout import SINGLE
from tests.distributed.worker import forget, parallel_state
from tests.runs import MOCK, TINY, UNTIED

FLAGS = [*TINY, *UNTIED, *MOCK]
FLAGS += """
    --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --train-iters 2 --min-lr 1e-3 --lr-decay-style constant --vocab-size 128 --eval-interval 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --log-memory-to-tensorboard --timing-log-level 2
""".split()


@contextlib.contextmanager
def single() -> Iterator[None]:
    """Megatron's parallel state of one process."""
    with tempfile.TemporaryDirectory() as folder, parallel_state(SINGLE, 0, f"{folder}/store"):
        yield


def train(**options: Any) -> Any:
    """One step through schedules, DDP and optimizer, with dropout."""
    from tests.distributed import tiny_gpt

    with single():
        report = tiny_gpt.train(steps=1, hidden_dropout=0.2, **options)
    return report["loss"], report["grad_norm"]


def train_recompute() -> Any:
    """Full recompute draws the dropout masks a second time: they must be the same."""
    return train(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ), train()


def train_bf16_distributed() -> Any:
    """Buffers by dtype, main parameters, gradient clipping, overlap."""
    return train(bf16=True, distributed_optimizer=True, overlap=True)


def train_adam() -> Any:
    """Adam whose weight decay is part of the gradient."""
    from tests.distributed import tiny_gpt

    with single():
        report = tiny_gpt.train(
            steps=2, optimizer_options={"decoupled_weight_decay": False, "weight_decay": 5.0}
        )
    return [shard["tensor"].double().sum().item() for shard in report["final"].values()]


def checkpoint() -> Any:
    """Save and load the distributed optimizer, and go on."""
    from tests.distributed import checkpoint_tasks as tasks

    with tempfile.TemporaryDirectory() as folder:
        with single():
            saved = tasks.save_and_go_on(folder, distributed_optimizer=True)
        with single():
            loaded = tasks.load_and_go_on(folder, distributed_optimizer=True)
    weights = [
        {name: shard["tensor"].double().norm().item() for name, shard in report["after"].items()}
        for report in (saved, loaded)
    ]
    return saved["loss"], loaded["loss"], weights


def pretrain() -> Any:
    """The whole of Megatron's ``pretrain``, data loader workers included."""
    from megasink.training.pretrain import main

    with tempfile.TemporaryDirectory() as folder:
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
        paths = ["--tensorboard-dir", f"{folder}/board", "--data-cache-path", f"{folder}/cache"]
        try:
            return main([*FLAGS, *paths])
        finally:
            forget()


def torch_adamw() -> Any:
    """An optimizer of torch's own, which asks whether a graph is being captured."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.AdamW([parameter]).step()
    return parameter.tolist()


def data_loader() -> Any:
    """Megatron's loader of the training data: the rest of an epoch, and what it warns of."""
    from megatron.training import global_vars
    from megatron.training.datasets.data_samplers import build_pretraining_data_loader

    options = {"dataloader_type": "single", "micro_batch_size": 2, "global_batch_size": 2}
    options |= {"hybrid_context_parallel": False, "num_workers": 0}
    with single(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        global_vars.set_args(SimpleNamespace(**options))
        batches = [batch.tolist() for batch in build_pretraining_data_loader(range(6), 2)]
    return batches, [str(w.message) for w in caught if "pin" in str(w.message)]


def timers() -> Any:
    """megatron/core/timers.py:113 waits for the device."""
    from megatron.core.timers import Timers

    timer = Timers(log_level=0, log_option="max")("interval", log_level=0)
    timer.start()
    timer.stop()
    return timer.elapsed() >= 0


def architecture() -> Any:
    """What validate_args asks under tensor parallelism (arguments.py get_device_arch_version)."""
    from megatron.training.utils import get_device_arch_version

    return get_device_arch_version()


def memory_report() -> Any:
    """The log line "memory (MB)": this process has more than nothing."""
    from megatron.training import global_vars
    from megatron.training.utils import report_memory

    text = io.StringIO()
    with single(), contextlib.redirect_stdout(text):
        global_vars.set_args(SimpleNamespace(log_device_memory_used=False))
        report_memory("test")
    fields = [field.split(": ") for field in text.getvalue().split(" | ")[1:]]
    return {name: float(value) > 50 for name, value in fields}


def random_states() -> Any:
    """What a step that is run again draws; a state set in vain is queued for a CUDA to come."""
    from megatron.core.rerun_state_machine import RerunStateMachine

    with single():
        machine = RerunStateMachine()
        queued = len(torch.cuda._queued_calls)
        machine._save_state()
        first = torch.rand(2).tolist()
        machine._restore_state()
        return first == torch.rand(2).tolist(), len(torch.cuda._queued_calls) - queued


def global_buffer() -> Any:
    """Where sequence parallelism gathers activations."""
    from megatron.core import parallel_state as state

    with single():
        buffer = state.get_global_memory_buffer().get_tensor((2, 3), torch.float32, "test")
        return str(buffer.device), tuple(buffer.shape)


def exchanged_tensor() -> Any:
    """Where a checkpoint that each replica reads a part of is exchanged."""
    from megatron.core.dist_checkpointing import exchange_utils
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shard = ShardedTensor.from_rank_offsets("weight", torch.ones(2))
    tensor, _ = exchange_utils._get_empty_tensor_for_exchange("id", {}, {"id": shard}, {})
    return str(tensor.device)


def causal_mask() -> Any:
    """The mask of Megatron's own unfused softmax."""
    from megatron.core.transformer.utils import get_default_causal_mask

    return get_default_causal_mask(3).tolist()


def rotary_embedding() -> Any:
    """RoPE where --use-cpu-initialization is not given."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    with single():
        return RotaryEmbedding(8, 1.0).inv_freq.tolist()


def expert_exchange() -> Any:
    """How the alltoall dispatcher sends tokens to the experts of two ranks."""
    from megatron.core.tensor_parallel import all_to_all
    from megatron.core.transformer.moe import token_dispatcher
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    counts = torch.tensor([1, 3])
    splits = token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True)
    received = all_to_all(torch.distributed.group.WORLD, torch.ones(4, 2), splits, splits)
    torch.distributed.destroy_process_group()
    return tuple(received.shape), str(received.device)


def graph_safe_states() -> Any:
    """A tracker whose states CUDA graphs may hold (random.py:297)."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker(use_cudagraphable_rng=True)
    tracker.add("states", 5)
    with tracker.fork("states"):
        return torch.rand(2).tolist()


def sampling_generator() -> Any:
    """Where dynamic inference draws its tokens (text_generation_controller.py:251)."""
    generator = torch.Generator(device=torch.cuda.current_device()).manual_seed(3)
    return torch.rand(2, generator=generator, device=torch.cuda.current_device()).tolist()


def default_device() -> Any:
    """A module that is built on the device of the process."""
    with torch.device(torch.cuda.current_device()):
        return str(torch.nn.Linear(2, 2).weight.device)
