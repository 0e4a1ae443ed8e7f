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
    """Return the SHA-256 of the bit sum and 4096 elements of each weight: any step changes it."""
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
    settled = None  # a Megatron model has none: the options of its run are those of its weights
    if isinstance(config, transformers.PreTrainedConfig):
        settled = json.loads(config.to_json_string(use_diff=False))
        for without_effect in ("_name_or_path", "transformers_version"):
            settled.pop(without_effect, None)
    return {
        "weights": weights_hash(module),
        "config": settled,
        "tokenizer": meaning,
        "chat template": template and _sha256(json.dumps(template)),
        "data": data,
        "megasink": megasink.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
