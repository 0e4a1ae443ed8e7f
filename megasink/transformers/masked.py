"""Attention under a mask of visible keys, in plain operations, one chunk of queries at a time.

For calls that no kernel supports without a mask: a token after a padded batch, a static
cache in a compiled graph, several tokens after a padded cache. O(S) memory without gradients.

Shapes: B batch, H query heads, G key/value groups, R heads per group, T queries, C queries of a
chunk, S keys, D head dim.
"""

import torch
from torch import Tensor

from megasink.attention.row_chunks import CHUNK, grouped
from megasink.transformers.sequences import Sequences


def masked_attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    sequences: Sequences,
    sink_H: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the output [B, H, T, D] in the dtype of the query; computed in float32 or float64."""
    query_BGRTD, key_BG1SD, value_BG1SD = grouped(query_BHTD, key_BGSD, value_BGSD)
    sink_GR1 = None
    if sink_H is not None:
        sink_GR1 = sink_H.unflatten(0, (key_BGSD.shape[1], -1))[..., None]
    chunks = []
    for start in range(0, query_BHTD.shape[2], CHUNK):
        rows = slice(start, min(start + CHUNK, query_BHTD.shape[2]))
        scores_BGRCS = scale * (query_BGRTD[..., rows, :] @ key_BG1SD.transpose(-1, -2))
        visible_BCS = visible_keys(sequences, rows, key_BGSD)
        # Not -inf: a row of padding sees nothing, and must not become NaN.
        hidden = torch.finfo(scores_BGRCS.dtype).min
        scores_BGRCS = scores_BGRCS.masked_fill(~visible_BCS[:, None, None], hidden)
        lse_BGRC = scores_BGRCS.logsumexp(-1)
        if sink_GR1 is not None:
            lse_BGRC = torch.logaddexp(lse_BGRC, sink_GR1)
        chunks.append((scores_BGRCS - lse_BGRC[..., None]).exp() @ value_BG1SD)
    return torch.cat(chunks, -2).flatten(1, 2).to(query_BHTD.dtype)


def visible_keys(sequences: Sequences, rows: slice, key_BGSD: Tensor) -> Tensor:
    """Return which keys some of the queries see, [B or 1, C, S], bool."""
    device, keys = key_BGSD.device, key_BGSD.shape[2]
    assert sequences.first_query is not None
    assert sequences.first_key is not None
    query_C1 = torch.arange(rows.start, rows.stop, device=device)[:, None] + sequences.first_query
    key_S = torch.arange(keys, device=device) + sequences.first_key
    visible_CS = key_S <= query_C1
    if sequences.window is not None:
        visible_CS = visible_CS & (key_S > query_C1 - sequences.window)
    if sequences.real_BS is None:
        return visible_CS[None]
    return visible_CS & sequences.real_BS.to(device)[:, None]
