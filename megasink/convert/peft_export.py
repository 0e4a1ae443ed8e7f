"""Export the adapter of a LoRA run in peft's own format."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megasink.checkpoints.adapter import base_of, fingerprint
from megasink.convert.adapted import adapter_of
from megasink.convert.megatron_reader import MegatronCheckpoint
from megasink.convert.output import whole_folder
from megasink.convert.peft_names import CONFIG, FINGERPRINT, PREFIX, WEIGHTS, Place, places
from megasink.convert.safetensors_writer import write_json
from megasink.convert.targets.target import Target
from megasink.convert.to_hf import Say, Source, refuse_nan
from megasink.errors import UserError
from megasink.lora.merge import Adapter
from megasink.lora.targets import A, B, is_lora, key_of
from megasink.printable import say as say_printable
from megasink.progress import tracked

# Of a merged weight, relative to its largest value: products of float32.
_TOLERANCE = 1e-5


def export_adapter(
    source: Source,
    output: Path,
    target_name: str | None = None,
    *,
    verify: bool = True,
    say: Say = say_printable,
) -> Target:
    """Write adapter_config.json and adapter_model.safetensors.

    ``peft.PeftModel.from_pretrained(model, output)`` loads it onto the exported base.

    Args:
        output: must be missing or empty; it appears when everything is written and verified.
        target_name: name of the base's architecture; None for the first that fits.
        verify: compare base + adapter, as written, with the merged weights.

    Raises:
        UserError: anything that the user can fix; no folder is left behind.
    """
    found, saved, model = source.found, source.saved, source.model
    if not is_lora(saved):
        raise UserError(f"--adapter: {found.config.parent} is not a LoRA run: drop --adapter")
    target, why = source.target(target_name)
    say(f"adapter for: {target.architecture} ({target.name}): {why}")
    adapter = adapter_of(found, saved, model)
    if beside := adapter.trained_beside():
        raise UserError(
            f"--adapter: the run also trained {beside[0]}"
            f"{f' and {len(beside) - 1} more' if len(beside) > 1 else ''} (--lora-train), for "
            "which peft's format has no place: drop --adapter to export the merged model"
        )
    known = places(target, model)
    used = {name: known[name] for name in adapter.targets()}
    tensors = {}
    for name, place in used.items():
        for layer in range(model.layers):
            down, up = (adapter.tensors[key_of(place.linear, name, m)][layer] for m in (A, B))
            at = PREFIX + place.module.format(layer=layer)
            for key, matrix in ((A, down), (B, place.to_hf(up, model))):
                refuse_nan(f"{at}.{key}", matrix)
                tensors[f"{at}.{key}.weight"] = matrix.contiguous()
    base = base_of(found.config)
    with whole_folder(output) as folder:
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        if verify:
            _verify(folder, MegatronCheckpoint(base), adapter, source, used, say)
        write_json(folder / FINGERPRINT, {"fingerprint": fingerprint(base)})
        write_json(folder / CONFIG, _config(saved, used))
    size = sum(tensor.nbytes for tensor in tensors.values())
    say(f"adapter: {len(tensors)} tensors, {size / 1e6:,.2f} MB")
    return target


def _config(saved: dict[str, Any], used: dict[str, Place]) -> dict[str, Any]:
    """Return peft's LoraConfig."""
    rank, alpha = saved["lora_rank"], saved.get("lora_alpha")
    alpha = rank if alpha is None else alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": saved.get("lora_dropout") or 0.0,
        "target_modules": sorted({p.module.rpartition(".")[2] for p in used.values()}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
    }


def _verify(
    folder: Path,
    base: MegatronCheckpoint,
    adapter: Adapter,
    source: Source,
    used: dict[str, Place],
    say: Say,
) -> None:
    """Compare W + alpha/r B A of the written matrices with the merged weights, in float32.

    Raises:
        UserError: they differ.
    """
    written, worst, count = load_file(folder / WEIGHTS), 0.0, 0
    steps = [(place, layer) for place in used.values() for layer in range(source.model.layers)]
    for place, layer in tracked(steps, "verifying", len(steps), "layers"):
        keys = place.row.megatron
        weights = [base.read(key, (layer,)).float() for key in keys]
        merged = [adapter.merged(k, layer, w) for k, w in zip(keys, weights, strict=True)]
        before, after = (place.row.transform.to_hf(*w)[place.part] for w in (weights, merged))
        at = PREFIX + place.module.format(layer=layer)
        down, up = (written[f"{at}.{m}.weight"].float() for m in (A, B))
        error = (before + adapter.scaling * (up @ down) - after).abs().max()
        worst = max(worst, float(error / after.abs().max().clamp(min=torch.finfo().tiny)))
        count += 1
        if not worst <= _TOLERANCE:
            raise UserError(
                f"{at}: base and adapter differ from the merged weight by {worst:.1g} of its "
                "largest value: is the disk bad? Nothing was kept"
            )
    say(f"verified: {count} merged weights, within {worst:.1g} of their largest value")
