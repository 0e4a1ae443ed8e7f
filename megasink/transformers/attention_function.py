"""The attention function that transformers calls in each layer.

Shapes: B rows, H query heads, G key/value groups, T queries, S keys, D head dim, V head dim of the
values (at most D).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megasink.attention import AttentionOutput, attention
from megasink.attention.layout import statistics_dtype
from megasink.attention.row_chunks import CHUNK, grouped
from megasink.transformers.attention_mask import Sequences, documents_of, refuse, refuse_packed
from megasink.transformers.row_order import as_rows, one_row

# Names of the dropout of attention weights in models' configurations.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
# Arguments of attention functions that change the result, and their meaning.
_REFUSED = {
    "softcap": "it caps its attention scores (softcap)",
    "position_bias": "it adds a position bias to its attention scores",
    "head_mask": "it masks heads (head_mask)",
    "indices": "its attention chooses keys (sparse attention)",
    "block_indices": "its attention chooses blocks of keys (sparse attention)",
}


def megasink_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Sequences | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention by `megasink.attention`; an attention function of transformers.

    While a module with the attribute `megasink_heads` trains, its output is
    `megasink_heads(out_BHTD, gate_BHT, real_BT)`: the gates are those of
    `megasink.attention.attention`, and `real_BT` is True for tokens that are not padding (None: all
    are).

    Args:
        module: The attention layer.
        query, key, value: [B, H, T, D], [B, G, S, D], [B, G, S, V]; one dtype, or cast to that of
            autocast.
        attention_mask: The result of `megasink_mask`; None if the model makes no mask.
        dropout: Must be 0 in training.
        sliding_window: Tokens visible to a token, including itself; read only without a mask.
        s_aux: Sink logits [H]; computed with in float32 (float64 for float64), whatever the dtype.
        position_ids, cu_seq_lens_q: Of packed documents; see `documents_of`.

    Returns: out_BTHV, contiguous, and None for the weights, which are never materialized.
    """
    config = getattr(module, "config", None)
    sequences = _sequences(config, query, key, attention_mask, sliding_window, is_causal, module)
    _check(config, module, dropout, kwargs)
    device_type = query.device.type
    alone: AbstractContextManager[Any] = nullcontext()
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        alone = torch.autocast(device_type, enabled=False)
    if sequences.keys < sequences.length:
        key, value = key[:, :, : sequences.keys], value[:, :, : sequences.keys]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sink_H = None if s_aux is None else s_aux.to(statistics_dtype(query.dtype)).flatten()
    heads = getattr(module, "megasink_heads", None)
    if not (module.training and torch.is_grad_enabled()):
        heads = None
    with alone:
        if sequences.first_query is not None:
            _check_masked(config, query, key, value, heads)
            out_BHTD = masked_attention(query, key, value, sequences, sink_H, scale)
        else:
            documents = sequences.documents
            if documents is None and query.shape[2] == key.shape[2]:
                if sequences.real_BS is None:
                    shape = query.shape[0], query.shape[2]
                    documents = documents_of(*shape, position_ids, cu_seq_lens_q)
                else:
                    refuse_packed(config, position_ids, cu_seq_lens_q, sequences.real_BS)
            out_BHTD, _, gate_BHT = _attend(
                query, key, value, sequences, documents, sink_H, scale, with_gate=heads is not None
            )
            if heads is not None:
                real_BT = sequences.real_BS
                real_BT = None if real_BT is None else real_BT.to(query.device)
                out_BHTD = heads(out_BHTD, gate_BHT, real_BT)
    return out_BHTD.transpose(1, 2).contiguous(), None


def _attend(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    sequences: Sequences,
    documents: tuple[int, ...] | None,
    sink_H: Tensor | None,
    scale: float,
    *,
    with_gate: bool,
) -> AttentionOutput:
    """Call the op on rows or documents; the LSE of the result has the order of the op."""
    rows, order = query_BHTD.shape[0], sequences.order
    tensors = [query_BHTD, key_BGSD, value_BGSD]
    if order is not None:
        tensors = [order.apply(tensor) for tensor in tensors]
    elif documents is not None:
        tensors = [one_row(tensor) for tensor in tensors]
    out_BHTD, lse_BHT, gate_BHT = attention(
        *tensors,
        variant="vanilla" if sink_H is None else "sink",
        sink_H=sink_H,
        window=sequences.window,
        cu_seqlens=documents,
        scale=scale,
        with_gate=with_gate,
    )
    if order is not None:
        out_BHTD = order.undo(out_BHTD)
        gate_BHT = None if gate_BHT is None else order.undo(gate_BHT[..., None])[..., 0]
    elif documents is not None:
        out_BHTD = as_rows(out_BHTD, rows)
        gate_BHT = None if gate_BHT is None else as_rows(gate_BHT[..., None], rows)[..., 0]
    return AttentionOutput(out_BHTD, lse_BHT, gate_BHT)


def _sequences(
    config: Any,
    query: Tensor,
    key: Tensor,
    mask: Sequences | Tensor | None,
    window: int | None,
    is_causal: bool | None,
    module: nn.Module,
) -> Sequences:
    """Locate the sequences; refuse every mask that does not come from our function."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            refuse(
                config,
                f"{type(module).__name__} is not causal",
                'use "eager", or "megasink" for the decoder only: {"text_config": "megasink"}',
            )
        if queries not in (1, keys):
            refuse(config, f"it has no mask for {queries} queries and {keys} keys")
        return Sequences(queries, keys, keys, window)
    if not isinstance(mask, Sequences):
        shape = list(getattr(mask, "shape", ()))
        refuse(config, f"its mask has shape {shape}", 'pass a mask [rows, tokens] or use "eager"')
    if not mask.causal:
        refuse(config, f"{type(module).__name__} is bidirectional, or attends to an encoder")
    if (queries, keys) != (mask.queries, mask.length):
        refuse(
            config,
            f"{type(module).__name__} attends from {queries} queries to {keys} keys, but its mask "
            f"is for {mask.queries} and {mask.length}",
        )
    return mask


def _check(config: Any, module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout and module.training:
        named = [f"config.{name} = 0" for name in _DROPOUTS if getattr(config, name, 0)]
        refuse(
            config,
            f"it uses attention dropout {dropout}, with which sinks are not exact",
            f"set {named[0] if named else 'it to 0 in its configuration'} before the model is "
            'built, or use "eager"',
        )
    if kwargs.get("output_attentions"):
        refuse(config, "megasink never materializes the weights for output_attentions")
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            refuse(config, what)


def _check_masked(config: Any, query: Tensor, key: Tensor, value: Tensor, heads: Any) -> None:
    if heads is not None:
        refuse(config, "the head-balance loss needs whole sequences", "train without a cache")
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if grads and query.shape[2] > 1:
        refuse(
            config,
            "it needs gradients through a padded cache, or through padding between tokens",
            'pad on one side and train without a cache, or use "eager"',
        )


def masked_attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    sequences: Sequences,
    sink_H: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute attention under a mask of visible keys, in plain operations, CHUNK queries at a time.

    For calls that no kernel supports: a token after a padded batch, a static cache in a compiled
    graph, several tokens after a padded cache. C: queries in a chunk, R: heads per group.
    """
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
