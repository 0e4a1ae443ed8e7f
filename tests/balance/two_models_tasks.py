"""Tasks for the workers: models of different shapes that train in one process."""

import copy
import dataclasses
import pickle
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megasink.balance.gate_sums import HeadSums
from megasink.balance.step import Phase
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.head_observer import count_sinks, sink_rates
from tests.distributed import tiny_gpt

STEPS, MICROBATCHES = 2, 2
MODELS: dict[str, dict[str, Any]] = {
    "sink": {"head_balance_scope": "global", "num_attention_heads": 4},
    # Recompute asks for the targets of its microbatch in the backward pass.
    "gated": {
        "attention_variant": "gated",
        "num_layers": 3,
        "num_attention_heads": 8,
        "head_balance_scope": "microbatch",
        "head_balance_shared_heads": 1,
        "calculate_per_token_loss": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "vanilla": {
        "attention_variant": "vanilla",
        "num_attention_heads": 2,
        "head_balance_coeff": 0.5,
    },
}
LOSS_SCALES = {"sink": 8.0, "gated": 0.5, "vanilla": 3.0}
WARMUP = {"sink": 3, "gated": 0, "vanilla": 5}
OBSERVED = {"sink": True, "gated": True, "vanilla": False}


class Trained:
    """One model, and what it records."""

    def __init__(self, name: str):
        self.name, self.offset = name, list(MODELS).index(name)
        config = tiny_gpt.model_config(**MODELS[name])
        (self.model,) = tiny_gpt.build(config)
        self.config = get_model_config(self.model)
        self.statistics = self.config.statistics
        self.report: dict[str, list[Any]] = {"steps": [], "gradients": []}

    def forward(self, step: int, index: int) -> None:
        """Everything up to the loss of one microbatch."""
        data = tiny_gpt.batch(step, 10 * self.offset + index, masked=True)
        if self.model.training:
            share = min(1.0, (step + 1) / WARMUP[self.name]) if WARMUP[self.name] else 1.0
            if (self.statistics.phase, self.statistics.number) != (Phase.RUNNING, step):
                self.statistics.begin(step, observe=OBSERVED[self.name], share=share)
        self.statistics.set_targets(data["loss_mask"].sum())
        losses = self.model(data["tokens"], data["position_ids"], None, labels=data["labels"])
        losses = self.statistics.keep(losses)
        self.loss = (losses * data["loss_mask"]).sum() * LOSS_SCALES[self.name]

    def backward(self) -> None:
        """Of the microbatch that went forward last."""
        scale = torch.tensor([LOSS_SCALES[self.name] / MICROBATCHES])
        self.config.experimental_attention_variant_loss_scale_func(scale)
        self.loss.backward()

    def finish(self) -> None:
        """The end of a step, whose gradients move the weights."""
        found = dict(vars(tiny_gpt.statistics(self.config)))
        self.report["steps"].append([*found.pop("series").values(), *found.values()])
        weights = dict(self.model.named_parameters())
        self.report["gradients"].append({n: w.main_grad.clone() for n, w in weights.items()})
        with torch.no_grad():
            for weight in weights.values():
                weight -= 0.01 * weight.main_grad.sign()
        self.model.zero_grad_buffer()


def interleaved(names: list[str]) -> dict[str, Any]:
    """{name: all that a model records, its gradients and its state}, every call taking turns."""
    models = [Trained(name) for name in names]
    for step in range(STEPS):
        for index in range(MICROBATCHES):
            for model in models:
                model.forward(step, index)
            for model in models:
                model.backward()
        for model in models:
            model.config.finalize_model_grads_func([model.model])
        for model in reversed(models):
            model.finish()
    for model in models:
        model.model.eval()
        if model.name != "gated":
            count_sinks(model.statistics)
    for index in range(MICROBATCHES):
        for model in models:
            with torch.no_grad():
                model.forward(STEPS, index)
    report: dict[str, Any] = {}
    for model in models:
        state = {k: v for k, v in model.model.state_dict().items() if v is not None}
        report[model.name] = model.report | {"state": state}
        if model.statistics.sinks is not None:
            report[model.name]["rates"] = sink_rates(model.statistics)
    return report


def copies() -> dict[str, Any]:
    """Which copies of a config share its statistics, and what of them is written."""
    config = tiny_gpt.model_config().transformer
    statistics = config.statistics
    statistics.set_targets(torch.tensor(7.0))
    again = dataclasses.replace(config)
    pickled = pickle.loads(pickle.dumps(statistics))
    return {
        "copy": copy.copy(config).statistics is statistics,
        "deep copy": copy.deepcopy(config).statistics is statistics,
        "its loss scale": copy.deepcopy(
            config
        ).experimental_attention_variant_loss_scale_func.balance
        is statistics,
        "replaced": again.statistics is statistics,
        "loss scale of the replaced": again.experimental_attention_variant_loss_scale_func.balance
        is again.statistics,
        "pickled": (pickled.heads.layers, pickled.heads.heads, pickled.factors._targets),
        "fields": [f.name for f in dataclasses.fields(config) if "statistics" in f.name],
    }


def layers_of_one_model(**options: Any) -> bool:
    """Whether every layer of this rank's stages has the statistics of the model's config."""
    config = tiny_gpt.model_config(**options)
    models = tiny_gpt.build(config)
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    cores = [m for model in models for m in model.modules() if isinstance(m, CoreAttention)]
    assert len(models) == stages
    assert len(cores) >= stages
    wanted = get_model_config(models[0]).statistics
    return wanted is config.transformer.statistics and all(
        core.config.statistics is core.head_counter._statistics is wanted for core in cores
    )


def one_config_for_two() -> str:
    """What training a second model from the config of the first one says."""
    config = tiny_gpt.model_config()
    data = tiny_gpt.batch(0, 0)
    try:
        for _ in range(2):
            (model,) = tiny_gpt.build(config)
            loss = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
            loss.mean().backward()
    except RuntimeError as error:
        return str(error)
    return "trained"


def nothing_recorded() -> dict[str, Any]:
    """The statistics of a step in which no layer of any rank recorded."""
    tracker = HeadSums(layers=2, heads=2)
    tracker.start_reduction()
    statistics = tracker.finish_step(1.0, "global")
    assert statistics is not None
    return {
        "nan": bool(statistics.importance_LH.isnan().all()),
        "balance_loss": float(statistics.balance_loss),
    }
