"""Losses of texts in a changed model, and what a pass through it shows: kept by text.

Shapes: N texts, B texts of a batch, T tokens, L layers, H heads, M maps of a text.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megasink
from examples.real_models.analyses import FEW, TOKENS, Floats, Subject, long_texts
from examples.real_models.texts import MEASURED, read_texts
from examples.real_models.wheels import told
from megasink.analysis.capture.input_samples import repeated_first_token
from megasink.analysis.metrics.pca_tsne import attention_map_components
from megasink.files.atomic import atomic_file
from megasink.transformers.decoder_blocks import find_blocks

COPIES = 8
_BATCH = 20


def ids_of(subject: Subject, count: int | None = None, tokens: int = TOKENS) -> Tensor:
    """Return [N, T]: the first tokens of the measured texts, or of `count` of them, without BOS."""
    read = subject.hub.tokenizer
    texts = [text.text for text in read_texts()[: MEASURED if count is None else count]]
    found = read(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([ids[:tokens] for ids in found])


def kept(subject: Subject, name: str, compute: Callable[[], Floats]) -> Floats:
    """Return an array of the model's folder; compute it if it is missing."""
    path = subject.look / f"{name}.npy"
    if not path.is_file():
        print(f"{subject.name}: {name}", flush=True)
        with torch.no_grad():
            values = compute()
        with told(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                np.save(file, values, allow_pickle=False)
    values = np.load(path, allow_pickle=False)
    return values


def loss_with(
    subject: Subject, ids_NT: Tensor, content: int, changed: AbstractContextManager[Any]
) -> Floats:
    """Return [N]: nats per token of each text, over its tokens after the first of `content`."""
    losses = []
    with changed:
        for ids_BT in ids_NT.split(_BATCH):
            logits_BTV = subject.hub.model(input_ids=ids_BT, use_cache=False).logits
            for logits_TV, ids_T in zip(logits_BTV[:, -content:-1], ids_BT, strict=True):
                target_T = ids_T[1 - content :]
                losses.append(float(torch.nn.functional.cross_entropy(logits_TV.float(), target_T)))
    return np.array(losses)


def loss_drained(subject: Subject, threshold: float | None) -> Floats:
    """Return [N]: loss with the first value at zero, in all heads or above a threshold (Eq. 9)."""

    def compute() -> Floats:
        change = megasink.drain_first_value(subject.hub, threshold=threshold)
        return loss_with(subject, ids_of(subject), TOKENS, change)

    name = "all" if threshold is None else f"above {threshold:g}"
    return kept(subject, f"loss with the first value drained, {name}", compute)


def loss_unchanged(subject: Subject) -> Floats:
    """Return [N]: loss without BOS."""

    def compute() -> Floats:
        return loss_with(subject, ids_of(subject), TOKENS, nullcontext())

    return kept(subject, "loss", compute)


def loss_after_copies(subject: Subject, copies: int, *, bos: bool) -> Floats:
    """Return [N]: loss after copies of BOS, or of the text's first token (P4.4)."""

    def compute() -> Floats:
        token = subject.hub.tokenizer.bos_token_id if bos else None
        rows = [repeated_first_token(ids, copies, token) for ids in ids_of(subject).tolist()]
        return loss_with(subject, torch.tensor(rows), TOKENS, nullcontext())

    return kept(subject, f"loss after {copies} of {'BOS' if bos else 'the first token'}", compute)


@contextmanager
def outputs_of(modules: Sequence[torch.nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """Yield the outputs of modules, by number, in order."""
    found: dict[int, list[Tensor]] = {number: [] for number in range(len(modules))}

    def hook(number: int) -> Callable[..., None]:
        def keep(_module: torch.nn.Module, _args: Any, out: Any) -> None:
            found[number].append(out[0] if isinstance(out, tuple) else out)

        return keep

    hooks = [module.register_forward_hook(hook(n)) for n, module in enumerate(modules)]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def mlp_ratios(subject: Subject, block: int) -> Floats:
    """Return [N, 2]: norm at token 0 over the mean at others, of a block's up projection and of its
    gate after the activation (P4.6); NaN for an MLP without the two."""

    def compute() -> Floats:
        mlp, found = find_blocks(subject.hub.model)[block].module.mlp, []
        if not hasattr(mlp, "up_proj"):
            return np.full((1, 2), np.nan)
        with outputs_of([mlp.up_proj, mlp.act_fn]) as outputs:
            for ids_BT in ids_of(subject).split(_BATCH):
                subject.hub.model.get_decoder()(input_ids=ids_BT, use_cache=False)
                norms = [outputs[n].pop().float().norm(dim=-1) for n in range(2)]
                found.append(torch.stack([n[:, 0] / n[:, 1:].mean(-1) for n in norms], -1))
        return torch.cat(found).double().numpy()

    return kept(subject, f"MLP of block {block}", compute)


def norm_without_each_head(subject: Subject, block: int) -> Floats:
    """Return [H, N]: norm of token 0 after a block, without each head of block 0, over that with
    all (P4.7)."""

    def norms(change: AbstractContextManager[Any]) -> Floats:
        module, found = find_blocks(subject.hub.model)[block].module, []
        with change, outputs_of([module]) as outputs:
            for ids_BT in ids_of(subject, FEW).split(_BATCH):
                subject.hub.model.get_decoder()(input_ids=ids_BT, use_cache=False)
                found.append(outputs[0].pop()[:, 0].float().norm(dim=-1))
        return torch.cat(found).double().numpy()

    def compute() -> Floats:
        heads = subject.hub.model.config.get_text_config().num_attention_heads
        whole_N = norms(nullcontext())
        changed = [norms(megasink.zero_heads(subject.hub, [(0, h)])) for h in range(heads)]
        return np.stack(changed) / whole_N

    return kept(subject, f"token 0 after block {block} without each head of block 0", compute)


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """The model gives its attention maps."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def maps_of(subject: Subject, ids_BT: Tensor) -> tuple[Tensor, ...]:
    """Return the attention maps [B, H, T, T] of each layer."""
    with eager(subject.hub.model):
        body = subject.hub.model.get_decoder()
        maps: tuple[Tensor, ...] = body(
            input_ids=ids_BT, use_cache=False, output_attentions=True
        ).attentions
    return maps


def map_components(subject: Subject) -> Floats:
    """Return [N]: share of the first two components of all maps of a text (P3.27)."""

    def compute() -> Floats:
        found = []
        for ids_T in ids_of(subject, FEW):
            maps_MTT = torch.cat(maps_of(subject, ids_T[None]), 1)[0].numpy()
            found.append(attention_map_components(maps_MTT).explained_C.sum())
        return np.array(found)

    return kept(subject, "components of maps", compute)


def window_first_key(subject: Subject) -> Floats:
    """Return [N]: weight on the first key of a full sliding window, times its length, mean over
    the layers that have one; NaN for a model without (P2.19). Long texts of two windows."""

    def compute() -> Floats:
        config = subject.hub.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        layers = [
            layer
            for layer, kind in enumerate(getattr(config, "layer_types", None) or [])
            if kind == "sliding_attention"
        ]
        if not window or not layers:
            return np.full(1, np.nan)
        found = []
        for text in long_texts()[:8]:
            ids = subject.hub.tokenizer(text.text, add_special_tokens=False)["input_ids"]
            maps = maps_of(subject, torch.tensor([ids[: 2 * window]]))
            # Row i of a window of w sees keys i - w + 1 to i; full from row w on, without key 0.
            first = [maps[at][0].diagonal(1 - window, -2, -1)[:, 1:].mean() for at in layers]
            found.append(window * float(torch.stack(first).mean()))
        return np.array(found)

    return kept(subject, "first key of a window", compute)


def sentence_starts(subject: Subject) -> list[list[int]]:
    """Return for each measured text the tokens of its first half, without the first, that begin a
    sentence: after a full stop, question or exclamation mark and a space."""
    read = subject.hub.tokenizer
    found = []
    for text in read_texts()[:MEASURED]:
        offsets = read(text.text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in offsets["offset_mapping"]]
        found.append([k for k in range(1, TOKENS // 2) if _begins(text.text, starts[k])])
    return found


def _begins(text: str, start: int) -> bool:
    """Whether a sentence begins at a character; the space may be the token's own."""
    before = text[:start] + (" " if text[start : start + 1].isspace() else "")
    return before.rstrip() != before and before.rstrip()[-1:] in tuple(".?!")
