"""Tasks for the workers: `megasink generate` and what it loads."""

import contextlib
import io
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as torch_checkpoint
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megasink.checkpoints.load import load_model
from megasink.cli import main


def megasink(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """(exit code, output, error stream) of each command line."""
    answers = []
    for argv in commands:
        with (
            contextlib.redirect_stdout(io.StringIO()) as output,
            contextlib.redirect_stderr(io.StringIO()) as errors,
        ):
            code = main(argv)
        answers.append((code, output.getvalue(), errors.getvalue()))
    return answers


def differences(run: str, checkpoint: str) -> dict[str, Any]:
    """What the loaded weights are, against the tensors that plain torch reads from the files.

    Returns:
        "different": names of weights that are not equal to the bit; "kinds": of weights; "sinks":
        those of layer 0; "training": of the model.
    """
    model = load_model(run).model
    reader = torch_checkpoint.FileSystemReader(checkpoint)
    stored = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size") and not key.startswith("optimizer.")
    }
    torch_checkpoint.load(stored, storage_reader=reader, no_dist=True)
    moved = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    different, kinds = [], set()
    for name, tensor in model.state_dict().items():
        if name.endswith("_extra_state"):  # TransformerEngine's, of fp8: no tensor
            continue
        key = name
        if key.startswith("decoder.layers."):
            layer, _, rest = key.removeprefix("decoder.layers.").partition(".")
            for ours, theirs in moved.items():
                rest = rest.replace(ours, theirs)
            key = f"decoder.layers.{layer}.{rest}"
        kinds.add(key)
        if not np.array_equal(stored[key].float().numpy(), tensor.float().numpy()):
            different.append(name)
    sinks = model.decoder.layers[0].self_attention.core_attention.softmax_offset
    return {
        "different": different,
        "kinds": kinds == set(stored),
        "sinks": sinks.detach(),
        "training": model.training,
    }


def yarn_angles(run: str, factor: float) -> dict[str, float]:
    """The rotary angles of a run with YaRN against those of transformers, in radians.

    Returns:
        "difference", "from_plain": the largest one from YaRN's, and from the run's own angles;
        "temperature": what cosines and sines are multiplied by.
    """
    plain = load_model(run)
    length, size = plain.args.seq_length, plain.args.kv_channels
    model = load_model(run, yarn=factor).model
    config = LlamaConfig(
        head_dim=size,
        max_position_embeddings=round(factor * length),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": float(plain.args.rotary_base),
            "factor": factor,
            "original_max_position_embeddings": length,
        },
    )
    inv_freq, temperature = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    expected = torch.outer(torch.arange(2.0 * length), inv_freq)
    table, found = model.rotary_pos_emb.get_emb(2 * length)
    angles = table[:, 0, 0, : size // 2]
    old = plain.model.rotary_pos_emb.get_emb(2 * length)[:, 0, 0, : size // 2]
    assert temperature == found
    return {
        "difference": float((angles - expected).abs().max()),
        "from_plain": float((old - expected).abs().max()),
        "temperature": found,
    }
