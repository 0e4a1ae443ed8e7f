"""The same weights and batches in Megatron and in transformers, for the workers of the pool."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file
from torch import Tensor

from megasink.convert.from_hf import arguments_of
from megasink.convert.model_flags import model_flags
from megasink.convert.to_hf import export, source_of
from tests.convert.tasks import layout_config, save_checkpoint
from tests.convert.tiny import DELTA_NET
from tests.convert.tiny import model as architecture_of
from tests.distributed import tiny_gpt
from tests.distributed.skewed_gates import skew_gates

# target -> its architecture; the batches are those of tests/distributed.
_SIZE: dict[str, Any] = {"vocabulary": tiny_gpt.VOCABULARY, "padded": tiny_gpt.VOCABULARY}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "granite_swa": {"attention": "sink", "windows": (None, 5)},
    "qwen3_5_text": {
        "attention": "elementwise",
        "qk_norm": True,
        "delta_net": DELTA_NET,
        "linear_layers": (True, False),
    },
}
STEPS = 3


def trained_twice(name: str, masked: bool, flags: list[str], **options: Any) -> dict[str, Any]:
    """Train a model in Megatron and its export by HeadBalanceLoss."""
    import megasink.transformers  # noqa: F401  registers the attention

    if masked:
        flags = [*flags, "--calculate-per-token-loss"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        args, _ = arguments_of([*model_flags(architecture_of(**_SIZE, **MODELS[name])), *flags])
        args.vocab_size, args.tokenizer_type = tiny_gpt.VOCABULARY, "NullTokenizer"
        config = layout_config(args)
        models = tiny_gpt.build(config)
        tiny_gpt.skew_sinks(models)
        skew_gates(models)
        (plain,) = unwrap_model(models)

        def exported(label: str, values: dict[str, Tensor] | None) -> Path:
            """A folder of transformers of the model with these values as its weights."""
            kept = {n: p.detach().clone() for n, p in plain.named_parameters()}
            with torch.no_grad():
                for key, parameter in plain.named_parameters():
                    parameter.copy_(kept[key] if values is None else values[key])
                save_checkpoint(root / f"{label}-run", args, plain)
                for key, parameter in plain.named_parameters():
                    parameter.copy_(kept[key])
            source = source_of(root / f"{label}-run", target=name)
            export(source, root / label, say=lambda _: None)
            return root / label

        start = exported("start", None)
        ours = _in_transformers(start, masked, **options)
        megatron, gradients = _in_megatron(config, models, plain, masked)
        # The conversion of norms may have a constant part: that of zero.
        zero = {key: torch.zeros_like(value) for key, value in gradients.items()}
        constant = load_file(exported("zero", zero) / "model.safetensors")
        found = load_file(exported("gradients", gradients) / "model.safetensors")
        megatron["gradients"] = {key: found[key] - constant[key] for key in found}
        megatron["final"] = load_file(exported("final", None) / "model.safetensors")
    return {"megatron": megatron, "transformers": ours}


def _in_megatron(
    config: Any, models: list[Any], plain: Any, masked: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Three steps through Megatron's schedule; also the gradients of the second."""
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.0,
        adam_eps=1e-5,
        clip_grad=0.0,
        params_dtype=torch.float32,
    )
    optimizer = get_megatron_optimizer(optimizer_config, models)
    count = tiny_gpt.MICROBATCHES
    init_num_microbatches_calculator(0, None, tiny_gpt.MICROBATCH * count, tiny_gpt.MICROBATCH, 1)
    config.transformer.grad_scale_func = optimizer.scale_loss
    report: dict[str, Any] = {"loss": [], "balance_loss": [], "importance": []}
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        losses = tiny_gpt.run_step(models, optimizer, step, masked)
        assert losses is not None
        total, targets = losses
        last = tiny_gpt.statistics(config.transformer)
        if step == 1:
            gradients = {n: p.main_grad.clone() for n, p in plain.named_parameters()}
        optimizer.step()
        report["loss"].append(total / targets)
        report["balance_loss"].append(float(last.balance_loss))
        report["importance"].append(last.importance_LH)
    return report, gradients


def _in_transformers(folder: Path, masked: bool, **options: Any) -> dict[str, Any]:
    """The same steps of the exported model."""
    from transformers import AutoModelForCausalLM

    from megasink.transformers.balance_loss import HeadBalanceLoss

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="megasink", dtype=torch.float32
    ).train()
    balance = HeadBalanceLoss(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)
    report: dict[str, Any] = {"loss": [], "balance_loss": [], "importance": []}
    for step in range(STEPS):
        batches = [tiny_gpt.batch(step, i, masked) for i in range(tiny_gpt.MICROBATCHES)]
        targets = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum()
        total = 0.0
        for batch in batches:
            labels = batch["labels"].where(batch["loss_mask"] > 0, -100)
            given: dict[str, Any] = {"labels": labels, "shift_labels": labels}
            if masked:
                given["num_items_in_batch"] = targets
            loss = model(input_ids=batch["tokens"], **given).loss
            loss = loss if masked else loss / len(batches)
            loss.backward()
            total += float(loss)
        if step == 1:
            named = model.named_parameters()
            report["gradients"] = {name: value.grad.clone() for name, value in named}
        last = balance.finish_step()
        optimizer.step()
        optimizer.zero_grad()
        report["loss"].append(total)
        report["balance_loss"].append(float(last.balance_loss))
        report["importance"].append(last.importance_LH)
    report["final"] = {name: value.detach() for name, value in model.named_parameters()}
    return report
