"""Load a model and its tokenizer from a Hugging Face folder; no code in the folder runs."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging

from megasink.data.hf_tokenizer import refuse_unusable
from megasink.errors import UserError, listed, reason_of
from megasink.files.checked_fields import Count, Layers, check, fields
from megasink.files.json_file import read_object
from megasink.files.weight_files import weight_files
from megasink.transformers.modeling.configuration_megasink import MegasinkConfig
from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_READ = ("sdpa", "eager")
_PLAIN = ("F64", "F32", "F16", "BF16")
# transformers makes a list of this many layers before it checks them.
_SIZES = fields(
    dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), Layers | None)
    | dict.fromkeys(("hidden_size", "vocab_size", "num_attention_heads"), Count | None)
)


def load(
    folder: Path,
    device: str,
    *,
    tokenizer: Path | None = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    quiet: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """Return the model, on a device in evaluation mode, and the tokenizer."""
    with _quiet(bars=quiet), _named(folder, tokenizer):
        _know_our_own()
        _check_sizes(folder / "config.json")
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        requested = attn_implementation or config._attn_implementation
        if requested not in (None, *_READ):
            raise UserError(
                f"{folder} uses {requested}, which exposes neither weights nor masks: add "
                "--attn-implementation sdpa or eager"
            )
        loaded = AutoTokenizer.from_pretrained(tokenizer or folder, **_LOCAL)
        refuse_unusable(loaded, tokenizer or folder)
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        model = load_weights(folder, dtype=kind, attn_implementation=attn_implementation)
    return model.eval().to(device), loaded


def load_weights(
    folder: Path, *, dtype: torch.dtype | str, attn_implementation: str | None
) -> PreTrainedModel:
    """Return the model of a folder, on the CPU."""
    with _quiet(bars=False), _named(folder):
        _know_our_own()
        _check_sizes(folder / "config.json")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the mismatches
            **_LOCAL,
        )
    model, report = loaded
    # Without keys that the class itself ignores: buffers, multi-token prediction, tied copies.
    lost = [f"{type(model).__name__} has no {name}" for name in report["unexpected_keys"]]
    wrong = [f"{name} is missing" for name in sorted(report["missing_keys"])] + sorted(lost)
    wrong += [
        f"{name} is {list(there)}, not {list(wanted)}"
        for name, there, wanted in sorted(report["mismatched_keys"])
    ]
    packed = read_object(folder / "config.json").get("quantization_config") or {}
    if packed.get("quant_method") not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        wrong += [
            f"{name} is stored as {kind}, without a quantization_config that transformers knows"
            for path in weight_files(folder)
            for name, kind in _types(path).items()
            if kind not in _PLAIN and (name.endswith("weight") or kind[:2] in ("F4", "F8"))
        ]
    if wrong:
        few = listed(wrong, 2)
        raise UserError(f"the weights in {folder} do not match its config.json: {few}")
    return cast(PreTrainedModel, model)


def _types(path: Path) -> dict[str, str]:
    """Return the type of each tensor in a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def _check_sizes(path: Path) -> None:
    """Refuse impossible sizes, which would take all memory or an hour."""
    config = read_object(path)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            check(_SIZES, part, str(path))


def _know_our_own() -> None:
    """Register the package's copy of megasink's modeling file."""
    AutoConfig.register("megasink", MegasinkConfig, exist_ok=True)
    AutoModelForCausalLM.register(MegasinkConfig, MegasinkForCausalLM, exist_ok=True)


@contextlib.contextmanager
def _named(folder: str | Path, tokenizer: str | Path | None = None) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    # transformers raises nearly anything for missing, broken or mismatched files, and for kernels
    # that are not installed
    except Exception as error:
        text = reason_of(error).partition(" Model type should be one of")[0]
        text = text if len(text) < 600 else f"{text[:600]} ..."
        if "trust_remote_code" in text:
            text = "it needs custom code, and megasink runs no code from a model folder"
        where = f"{folder}" + (f" with {tokenizer}" if tokenizer else "")
        raise UserError(f"transformers cannot load {where}: {text}") from error


@contextlib.contextmanager
def _quiet(*, bars: bool) -> Iterator[None]:
    """Silence the weight tables of transformers; one message of ours replaces them."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    if bars or not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
