"""Every replacement of the CPU platform serves upstream code that fails, or lies, without it.

For each of them a scenario of upstream code runs twice in a process of its own: on the whole
platform, and with that one replacement undone. A replacement that changes nothing is dead.
"""

import pytest

from tests.distributed.pool import Pool
from tests.versions import is_old

# What AdamW of this torch asks, and of 2.11.
ADAMW = ("torch.accelerator.is_available", "torch.cuda.is_current_stream_capturing")
# {replacement: the scenario, in scenarios.py, that needs it}.
NEEDED_BY = {
    "torch.cuda.is_available": "pretrain",
    "torch.cuda.device_count": "pretrain",
    "torch.cuda.current_device": "global_buffer",
    "torch.cuda.set_device": "pretrain",
    "torch.cuda.get_device_properties": "architecture",
    "torch.cuda.synchronize": "timers",
    "torch.cuda.memory_stats": "pretrain",
    "torch.cuda.memory.memory_stats": "memory_report",
    "torch.cuda.Stream": "train",
    "torch.cuda.current_stream": "train",
    "torch.cuda.stream": "train",
    "torch.cuda.get_rng_state": "random_states",
    "torch.cuda.set_rng_state": "random_states",
    "torch.cuda.manual_seed": "train",
    ADAMW[is_old("torch")]: "torch_adamw",
    "torch.utils.data.DataLoader": "data_loader",
    "torch.Generator": "sampling_generator",
    "DeviceContext.__init__": "default_device",
    "torch.arange": "rotary_embedding",
    "torch.empty": "global_buffer",
    "torch.empty_like": "exchanged_tensor",
    "torch.ones": "causal_mask",
    "torch.rand": "pretrain",
    "torch.tensor": "train",
    "torch.zeros": "train",
    "Tensor.to": "train",
    "Tensor.cuda": "checkpoint",
    "Tensor.new_empty": "expert_exchange",
    "Tensor.type": "train_bf16_distributed",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": "graph_safe_states",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": "train_recompute",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": "expert_exchange",
    "megatron.core.optimizer.Adam": "train_adam",
    "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER": "checkpoint",
    "megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE": "checkpoint",
}
SCENARIOS = sorted(set(NEEDED_BY.values()))
TASKS = "tests.cpu.prober"


@pytest.fixture(scope="module")
def answers():
    """{(replacement undone or None, scenario): (succeeded, answer)}.

    From workers that have done nothing yet: the probe forks, and a process in which gloo has run
    holds threads whose locks a fork copies in whatever state they are.
    """
    with Pool(2) as workers:
        jobs = [(None, scenario) for scenario in SCENARIOS] + list(NEEDED_BY.items())
        shares = workers.run(f"{TASKS}:probe", jobs=jobs)
    return shares[0] | shares[1]


def test_every_replacement_is_in_the_table(pool):
    """Or is a function of torch that takes a device, or a generator's: test_platform.py."""
    registered, by_themselves = pool.run(f"{TASKS}:registered")[0]
    assert registered >= set(NEEDED_BY)
    assert registered - {*NEEDED_BY, *ADAMW} <= by_themselves


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_upstream_code_runs_on_the_platform(answers, scenario):
    succeeded, answer = answers[None, scenario]
    assert succeeded, answer


@pytest.mark.parametrize("target", NEEDED_BY)
def test_upstream_code_needs_the_replacement(answers, target):
    scenario = NEEDED_BY[target]
    assert answers[target, scenario] != answers[None, scenario]


def test_answers_are_right(answers):
    """What the platform answers, where a value can be known."""
    assert answers[None, "memory_report"][1] == dict.fromkeys(
        ("allocated", "max allocated", "reserved", "max reserved"), True
    )
    assert answers[None, "random_states"][1] == (True, 0)
    assert answers[None, "global_buffer"][1] == ("cpu", (2, 3))
    assert answers[None, "exchanged_tensor"][1] == "cpu"
    assert answers[None, "expert_exchange"][1] == ((4, 2), "cpu")
    assert answers[None, "pretrain"][1] == 0
    assert answers[None, "data_loader"][1] == ([[2, 3], [4, 5]], [])  # batches, warnings
    recomputed, plain = answers[None, "train_recompute"][1]
    assert recomputed == plain  # the second forward drew the same dropout masks
    saved_loss, loaded_loss, (saved, loaded) = answers[None, "checkpoint"][1]
    assert (saved_loss, saved) == (loaded_loss, loaded)
