"""Tasks for workers: Megatron's own training loop with its own models, and what they compute."""

import contextlib
import copy
import dataclasses
import io
import os
import queue
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from tests.distributed.worker import forget
from tests.megatron.tasks import as_rank
from tests.security.crafted import Mark, entry_of, replace_entry, write_metadata

SINCE_0_18 = """
    null_tokenizer_eod_id null_tokenizer_pad_id muon_nesterov metadata_path mtp_detach_heads
    eval_global_batch_size eval_micro_batch_size start_eval_at_iter step_batch_size_schedule
    dataloader_inter_document_masking offset_sampling_seed_by_dp_rank use_layer_wise_param_layout
    tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards pad_vocab_size
    moe_mlp_glu_interleave_size moe_router_quantile_balancing_ema yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int yarn_original_max_position_embeddings""".split()
STOCK = str(Path(__file__).parents[1] / "megatron" / "stock")
# What the loop needs on a CPU, and megasink's trainer sets by itself.
ON_A_CPU = """--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion
    --distributed-backend gloo --use-cpu-initialization --eval-interval 100""".split()


def pretrain(
    flags: list[str], ranks: int, port: int, bridge: str | None = None
) -> dict[str, Any] | None:
    """Train; return the loss of each step and, of one rank, the logits of tokens 0, 1, 2, ..."""
    if not as_rank(ranks, port):
        return None
    from megasink import cpu

    cpu.activate()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as Megatron's launch scripts
    import torch
    from megatron.core.datasets import gpt_dataset, utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.enums import ModelType
    from megatron.core.transformer import torch_norm
    from megatron.training import argument_utils, training
    from megatron.training.arguments import parse_and_validate_args

    if STOCK not in sys.path:
        sys.path.append(STOCK)
    import pretrain_gpt as script

    found: dict[str, Any] = {"losses": []}
    log = training.training_log

    def logged(losses: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if losses:
            found["losses"].append(float(losses["lm loss"].reshape(-1)[0]))
        return log(losses, *args, **kwargs)

    setup = training.setup_model_and_optimizer

    def made(*args: Any, **kwargs: Any) -> Any:
        found["made"] = setup(*args, **kwargs)
        return found["made"]

    script.datasets.is_distributed = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["pretrain", *flags, *ON_A_CPU]))
        stack.enter_context(mock.patch.object(utils, "compile_helpers"))
        stack.enter_context(mock.patch.object(gpt_dataset.MockGPTLowLevelDataset, "size", 1000))
        # Else a process is started for it, which imports everything once more.
        stack.enter_context(mock.patch.object(filesystem_async, "_results_queue", queue.Queue()))
        stack.enter_context(mock.patch.object(training, "training_log", logged))
        stack.enter_context(mock.patch.object(training, "setup_model_and_optimizer", made))
        stack.enter_context(mock.patch.object(torch_norm.WrappedTorchNorm, "__new__", _norm()))
        if "--multi-latent-attention" in flags:
            _with_local_latent_attention(stack)
        try:
            args = parse_and_validate_args()
            if args.hybrid_layer_pattern:
                of_stack, norm = _local_stack()
                block = sys.modules[of_stack.module.__module__]
                stack.enter_context(mock.patch.object(block, "TENorm", norm))
                model = argument_utils.hybrid_config_from_args(args)
                model.hybrid_stack_spec = of_stack
            else:
                model = argument_utils.gpt_config_from_args(args)
            container = argument_utils.pretrain_cfg_container_from_args(args, model)
            training.pretrain(
                container, script.datasets, ModelType.encoder_or_decoder, script.forward_step
            )
            (model,) = found.pop("made")[0]
            if bridge:
                _write_bridge(Path(bridge), model, container)
            if ranks == 1:
                tokens = torch.arange(args.seq_length)[None]
                model.eval()
                with torch.no_grad():
                    found["logits"] = model(tokens, tokens, None)[0]
        finally:
            forget()
    return found


def _norm() -> Any:
    """Megatron's norm of torch, which refuses sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    new = WrappedTorchNorm.__new__

    def made(cls: Any, config: Any, hidden_size: int, **options: Any) -> Any:
        config = copy.copy(config)
        is_sharded, config.sequence_parallel = config.sequence_parallel, False
        norm = new(cls, config, hidden_size, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = is_sharded
        return norm

    return made


def _with_local_latent_attention(stack: contextlib.ExitStack) -> None:
    """Let Megatron's own layers run latent attention without TransformerEngine: they refuse widths
    of keys and values, and name norms otherwise than the layers that TransformerEngine fuses.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.models import gpt

    init, local = DotProductAttention.__init__, gpt.get_gpt_layer_local_spec
    parts = {
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }

    def without_widths(self: Any, *args: Any, **kwargs: Any) -> None:
        own = {name: value for name, value in kwargs.items() if not name.endswith("_channels")}
        init(self, *args, **own)

    def named(*args: Any, **kwargs: Any) -> Any:
        spec = local(*args, **kwargs)
        renamed = dataclasses.replace(spec.submodules, sharded_state_dict_keys_map=parts)
        return dataclasses.replace(spec, submodules=renamed)

    stack.enter_context(mock.patch.object(DotProductAttention, "__init__", without_widths))
    stack.enter_context(mock.patch.object(gpt, "get_gpt_layer_local_spec", named))


def _local_stack() -> tuple[Any, Any]:
    """Megatron's hybrid stack, of which only the spec of TransformerEngine is named: here of its
    modules for a CPU. Returns it with its norm."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    no_ffn = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    no_attention = {"input_layernorm": IdentityOp, "self_attention": IdentityOp}
    no_attention |= {"self_attn_bda": IdentityFuncOp}
    halves = ((layer.module, no_ffn), (MLPLayer, no_attention))
    attention, ffn = (
        ModuleSpec(module=module, submodules=dataclasses.replace(layer.submodules, **without))
        for module, without in halves
    )
    layers = HybridStackSubmodules(attention_layer=attention, mlp_layer=ffn)
    return ModuleSpec(module=HybridStack, submodules=layers), WrappedTorchNorm


def _write_bridge(folder: Path, model: Any, container: Any) -> None:
    """Write a checkpoint as training/checkpointing.py of Megatron-Bridge does."""
    from megatron.core import dist_checkpointing

    iteration = folder / "iter_0000004"
    iteration.mkdir(parents=True)
    state = {"checkpoint_version": 3.0, "iteration": 4, "model": model.module.sharded_state_dict()}
    dist_checkpointing.save(state, str(iteration))
    file = iteration / "run_config.yaml"
    container.to_yaml(str(file))
    config = yaml.safe_load(file.read_text())  # without functions, of which Bridge adds one
    config["model"]["transformer"]["activation_func"] = "silu"
    file.write_text(yaml.safe_dump(config))
    (folder / "latest_checkpointed_iteration.txt").write_text("4")


def loaded(run: str, port: int) -> Any:
    """The logits of tokens 0, 1, 2, ... of a run's model."""
    if not as_rank(1, port):
        return None
    from megasink import cpu

    cpu.activate()
    import torch

    from megasink.checkpoints.find import find_checkpoint
    from megasink.checkpoints.load import load_without_tokenizer, single_process

    with single_process():
        model, args = load_without_tokenizer(find_checkpoint(Path(run)))
        tokens = torch.arange(args.seq_length)[None]
        with torch.no_grad():
            return model(tokens, tokens, None)[0]


def adopt(lines: list[list[str]]) -> list[tuple[int, str]]:
    """The exit code and stderr of ``megasink adopt`` with each line, in one process."""
    if os.environ["POOL_RANK"] != "0":
        return []
    from megasink.cli import main

    answers = []
    for line in lines:
        with contextlib.redirect_stderr(io.StringIO()) as told:
            code = main(["adopt", *line])
        answers.append((code, told.getvalue()))
    return answers


def edit(checkpoint: str, changes: dict[str, Any] | None, code: str | None = None) -> None:
    """Change the arguments that a checkpoint holds; None removes them all."""
    folder = Path(checkpoint)
    more = {"tracker": Mark(Path(code))} if code else {}

    def change(state: Any) -> Any:
        if changes is None:
            del state[0]["args"]
        else:
            vars(state[0]["args"]).update(changes | more)
        return state

    replace_entry(folder, entry_of(folder, "common_state/"), change)


def move_to_common_pt(checkpoint: str) -> None:
    """Store the common state as Megatron-Core 0.17 does: fewer arguments, and one token more."""
    import torch
    from megatron.core.dist_checkpointing import load_common_state_dict
    from torch.distributed.checkpoint import FileSystemReader

    folder = Path(checkpoint)
    state = load_common_state_dict(checkpoint)
    metadata = FileSystemReader(folder).read_metadata()
    key = entry_of(folder, "common_state/")
    del metadata.state_dict_metadata[key]
    metadata.storage_data = {i: v for i, v in metadata.storage_data.items() if i.fqn != key}
    write_metadata(folder, metadata)
    state["args"].vocab_size -= 1
    for name in SINCE_0_18:
        delattr(state["args"], name)
    torch.save(state, folder / "common.pt")
