"""Identity of a model: everything besides options that changes its results."""

import hashlib
import json
from typing import Any

import torch
import transformers

import megasink
from megasink.data.hf_tokenizer import tokenizer_hash
from megasink.data.text_tokenizer import text_json

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READ = 4096
"""Elements hashed individually per weight; the others enter only through the sum of all bits."""


def weights_hash(module: torch.nn.Module) -> str:
    """Return the SHA-256 of the bit sum and 4096 evenly spaced elements of each weight.

    Reads every weight once in place and copies little; any training step changes the hash.
    """
    digest = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        bits = flat.view(_BITS[flat.itemsize])
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(str(int(bits.sum(dtype=torch.int64))).encode())
        # An odd stride reaches every column of a matrix, not the same few in every row.
        digest.update(bits[:: flat.numel() // _READ | 1].cpu().numpy().tobytes())
    return digest.hexdigest()


def model_identity(module: torch.nn.Module, tokenizer: Any, data: Any) -> dict[str, Any]:
    """Return what a resume compares besides options: all else that changes the results."""
    meaning = tokenizer_hash(tokenizer)
    if getattr(tokenizer, "is_fast", False):  # merges and normalization too
        meaning = _sha256(text_json(tokenizer) + meaning)
    template = getattr(tokenizer, "chat_template", None)
    config: Any = getattr(module, "config", None)
    return {
        "weights": weights_hash(module),
        # A Megatron model has none of its own: the options of its run are those of its weights.
        "config": _settled(config) if isinstance(config, transformers.PreTrainedConfig) else None,
        "tokenizer": meaning,
        "chat template": template and _sha256(json.dumps(template)),
        "data": data,
        "megasink": megasink.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _settled(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """Return the keys of a config.json that affect the computation."""
    given: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {k: v for k, v in given.items() if k not in ("_name_or_path", "transformers_version")}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
