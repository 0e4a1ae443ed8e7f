"""RoPE of a decoder trained with megasink, with every scaling that transformers supports.

Shapes: B batch, N heads or groups, T tokens, D head dim.
"""

import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update


def rotate(x, cos, sin):
    """Rotate the first channels of heads [B, N, T, D], as many as cos and sin [B, T, .] have."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    half = turned.shape[-1] // 2
    other = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    return torch.cat((turned * cos + other * sin, rest), dim=-1)


class MegasinkRotaryEmbedding(nn.Module):
    """Cosines and sines of positions, with the attributes that `dynamic_rope_update` expects."""

    def __init__(self, config):
        super().__init__()
        self.config, self.rope_type = config, config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        formulas = {"default": self.compute_default_rope_parameters, **ROPE_INIT_FUNCTIONS}
        if self.rope_type not in formulas:
            raise ValueError(
                f"transformers {transformers.__version__} does not support the rope_type "
                f"{self.rope_type!r}, only {', '.join(formulas)}"
            )
        frequencies, self.attention_scaling = formulas[self.rope_type](config)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, **kwargs):
        """Return the frequency of each channel pair, float32, and the factor of cos and sin."""
        channels = int(config.head_dim * config.rotary_percent)
        exponent = torch.arange(0, channels, 2, dtype=torch.float) / channels
        return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0

    def _apply(self, fn, recurse=True):
        """Keep the frequencies in float32 when the model is moved or cast."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, wide in before.items():
            moved = getattr(self, name)
            if moved.dtype != wide.dtype:
                setattr(self, name, wide.to(moved.device))
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        """Positions [B, T] -> cosines and sines [B, T, D] in the dtype of x."""
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        turns = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return tuple(turn.to(x.dtype) for turn in turns)


def sinusoids(position_ids, size):
    """Return [B, T, size]: channel 2k is sin(t / 10000 ** (2k / size)), 2k + 1 the cosine."""
    exponent = torch.arange(0, size, 2, device=position_ids.device).double() / size
    angle = position_ids[..., None].double() * 10000.0**-exponent
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).float()
