"""Tasks for the workers: adapters in one layer, in a model, and in the files of runs.

Shapes: S sequence, B batch, I and O inputs and outputs of a layer, V vocabulary.
"""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megasink.checkpoints.adapter import base_of, read_adapter
from megasink.checkpoints.find import find_checkpoint, stored_shapes
from megasink.checkpoints.load import load_state, load_without_tokenizer
from megasink.checkpoints.saved_arguments import read_arguments, single_process_arguments
from megasink.convert.verify import megatron_logits
from megasink.lora.attach import base_state
from megasink.lora.linear import with_adapter
from megasink.lora.targets import FC1, FC2, OPTIONS, PROJ, QKV, A, B
from megasink.megatron.model import MegasinkGPTBuilder
from megasink.megatron.model_of_arguments import model_config
from tests.distributed import tiny_gpt
from tests.training import generate_tasks

LINEARS = {QKV: ColumnParallelLinear, PROJ: RowParallelLinear}
LINEARS |= {FC1: ColumnParallelLinear, FC2: RowParallelLinear}


def layer_and_definition(
    linear: str, targets: list[str], alpha: float, seed: int = 0
) -> dict[str, Any]:
    """A layer in float64 with random matrices, and x (W + alpha/r B A)^T by `Adapter.merged`.

    Returns:
        "output" and "wanted" [S, B, O]; "gradients" and "wanted_gradients" of x, A and B.
    """
    config = tiny_gpt.model_config(
        lora_rank=3, lora_alpha=alpha, lora_targets=targets, head_balance_coeff=0.0
    ).transformer
    sizes = {QKV: (64, 128), PROJ: (64, 64), FC1: (64, 192), FC2: (96, 64)}
    column = linear in (QKV, FC1)
    extra = {"gather_output": False} if column else {"input_is_parallel": True}
    layer = with_adapter(LINEARS[linear], linear)(
        *sizes[linear],
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        skip_bias_add=True,
        **extra,
    ).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    layer.weight.requires_grad_(False)
    x_SBI = torch.randn(5, 2, sizes[linear][0], generator=generator, dtype=torch.float64)
    x_SBI.requires_grad_()
    weight_SBO = torch.randn(5, 2, sizes[linear][1], generator=generator, dtype=torch.float64)
    matrices = [m for name in targets for m in (layer.lora[name].lora_A, layer.lora[name].lora_B)]
    output, _ = layer(x_SBI)
    gradients = torch.autograd.grad((output * weight_SBO).sum(), [x_SBI, *matrices])
    wanted = x_SBI @ _merged(layer, linear, targets, alpha / 3, config).t()
    wanted_gradients = torch.autograd.grad((wanted * weight_SBO).sum(), [x_SBI, *matrices])
    return {
        "output": output.detach(),
        "wanted": wanted.detach(),
        "gradients": gradients,
        "wanted_gradients": wanted_gradients,
    }


def _merged(layer: Any, linear: str, targets: list[str], scaling: float, config: Any) -> Tensor:
    """W + alpha/r B A, written out row by row."""
    change = torch.zeros_like(layer.weight)
    names, rows = _rows_of(linear, config)
    for target in targets:
        pair = layer.lora[target]
        at = [row for row, name in enumerate(names) if name == target]
        assert len(at) == rows[target]
        change = change.index_put((torch.tensor(at),), scaling * (pair.lora_B @ pair.lora_A))
    return layer.weight + change


def _rows_of(linear: str, config: Any) -> tuple[list[str], dict[str, int]]:
    """The target of each row of a layer: the tiny model has 2 groups of 2 heads, head dim 16."""
    if linear == QKV:
        names = (["q_proj"] * 32 + ["k_proj"] * 16 + ["v_proj"] * 16) * 2
    elif linear == FC1:
        names = ["gate_proj"] * 96 + ["up_proj"] * 96
    else:
        names = [{PROJ: "o_proj", FC2: "down_proj"}[linear]] * 64
    return names, {name: names.count(name) for name in set(names)}


def skew_adapters(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """B and the changes of gates differ from 0, the same in every layout."""
    from megasink.megatron.init import _draw, global_names

    for model in models:
        names = global_names(model)
        for name, parameter in model.named_parameters():
            if ".lora." in name and not name.endswith("lora_A"):
                draw = lambda whole: torch.nn.init.normal_(whole, std=0.1)  # noqa: E731
                _draw(parameter.data, parameter, draw, names[name], 77, False)
    return models


def train(**options: Any) -> dict[str, Any]:
    """`tiny_gpt.train` from adapters that change something."""
    plain = tiny_gpt.model_config

    def with_skew(**given: Any) -> Any:
        config = plain(**given)
        config.pre_wrap_hooks.append(skew_adapters)
        return config

    tiny_gpt.model_config = with_skew
    try:
        return tiny_gpt.train(**options)
    finally:
        tiny_gpt.model_config = plain


def memory(distributed: bool, **options: Any) -> dict[str, int]:
    """How many values are trained, are in gradient buffers, and have optimizer states."""
    config = tiny_gpt.model_config(**options)
    models = tiny_gpt.build(config, use_distributed_optimizer=distributed)
    optimizer, _ = tiny_gpt.optimizer_of(config, models, distributed)
    tiny_gpt.init_num_microbatches_calculator(0, None, 8, 2, 1)
    config.transformer.grad_scale_func = optimizer.scale_loss
    tiny_gpt.run_step(models, optimizer, 0)
    optimizer.step()
    states = optimizer.optimizer.state.values()
    parameters = [p for model in models for p in model.parameters()]
    return {
        "all": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "gradients": sum(b.grad_data.numel() for m in models for b in m.buffers),
        "states": sum(state["exp_avg"].numel() for state in states),
    }


def unmerged_model(run: str) -> Any:
    """A LoRA run's model as it trains: base and adapter beside each other, in one process."""
    found = find_checkpoint(Path(run))
    saved = read_arguments(found.config)
    args = single_process_arguments(saved)
    for name in OPTIONS:
        setattr(args, name, saved[name])
    config = model_config(args)
    config.finalize()
    model = MegasinkGPTBuilder(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
    )
    model.to(args.params_dtype)
    load_state(model, base_state(model), base_of(found.config))
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": model.sharded_state_dict(metadata=groups)}
    model.load_state_dict(dist_checkpointing.load(state, str(found.folder))["model"])
    return model


def logits_of(run: str) -> dict[str, Any]:
    """Logits of random tokens, unmerged and merged, and of the base."""
    tokens_BS = random_tokens()
    found = find_checkpoint(Path(run))
    base = find_checkpoint(base_of(found.config))
    with torch.no_grad():
        models = (
            unmerged_model(run).eval(),
            load_without_tokenizer(found)[0],
            load_without_tokenizer(base)[0],
        )
        unmerged, merged, of_base = (megatron_logits(m, tokens_BS, 256) for m in models)
    return {"unmerged": unmerged, "merged": merged, "base": of_base}


def random_tokens() -> Tensor:
    """[B, S]."""
    return torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(5))


def against_peft(run: str, base_hf: str, merged_hf: str, adapter: str) -> dict[str, Any]:
    """peft's model on the exported base, the exported merged model, and Megatron's own.

    Returns:
        "logits" of each; "loss" of Megatron's and peft's; "gradients": {name: (Megatron's,
        peft's)} of every A and B.
    """
    import peft
    import transformers

    from megasink.convert.architecture import architecture_of
    from megasink.convert.peft_names import PREFIX, places
    from megasink.convert.targets import choose

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokens_BS = random_tokens()
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged = load(merged_hf, dtype=torch.float32).eval()
    theirs = peft.PeftModel.from_pretrained(
        load(base_hf, dtype=torch.float32, attn_implementation="eager"), adapter, is_trainable=True
    ).eval()
    ours = unmerged_model(run).eval()

    def loss_of(logits_BSV: Tensor) -> Tensor:
        return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())

    logits = {
        "merged": merged(tokens_BS).logits.detach(),
        "peft": theirs(tokens_BS).logits,
        "megatron": ours(tokens_BS, positions_BS, None)[..., :256],
    }
    losses = {name: loss_of(logits[name]) for name in ("peft", "megatron")}
    for loss in losses.values():
        loss.backward()
    model, _ = architecture_of(read_arguments(find_checkpoint(Path(run)).config), None)
    of_peft = dict(theirs.named_parameters())
    of_ours = dict(ours.named_parameters())
    gradients = {}
    for place in places(choose(model, None)[0], model).values():
        for layer in range(model.layers):
            for matrix in (A, B):
                name = f"decoder.layers.{layer}.{place.linear}.lora.{place.target}.{matrix}"
                at = f"{PREFIX}{place.module.format(layer=layer)}.{matrix}.default.weight"
                gradients[name] = (of_ours[name].grad, of_peft[at].grad)
    return {
        "logits": {name: tensor.detach() for name, tensor in logits.items()},
        "loss": {name: float(loss) for name, loss in losses.items()},
        "gradients": gradients,
    }


def adapter_tensors(run: str) -> dict[str, Tensor]:
    """The tensors of a LoRA run's newest checkpoint."""
    found = find_checkpoint(Path(run))
    return dict(read_adapter(found, read_arguments(found.config), None).tensors)


def stored_keys(run: str) -> list[str]:
    """Of the weights in the newest checkpoint."""
    return sorted(stored_shapes(find_checkpoint(Path(run)).folder))


def megasink(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """(exit code, output, error stream) of each command line, as one rank.

    A worker that was a rank of a run still has that run's WORLD_SIZE, for which `analyze` waits.
    """
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        return generate_tasks.megasink(commands)
