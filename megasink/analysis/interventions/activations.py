"""Read and replace activations by name, in a model of transformers or a run, while it runs.

A name is `layers.L.PLACE`, L from 0. Hooks of torch see the model's own tensors, as [B, T, ...]; a
probe measures the statistics of attention, which no module computes.

Shapes: B rows, T tokens, E hidden size, H query heads, G key/value groups, D head dim, F
intermediate size of the MLP.
"""

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.analysis.capture.first_block_tensors import DOWN
from megasink.analysis.capture.probe import Listener, Probe, hook_input
from megasink.analysis.capture.probed_models import open_probe_on
from megasink.analysis.capture.transformers_model import attention_of, replaced_attention
from megasink.analysis.metrics.registry import ATTENTION, BRANCHES
from megasink.errors import UserError, nearest, reason_of
from megasink.transformers.decoder_blocks import Block, child, decoder_config, decoder_of

PLACES = {
    "input": ("[B, T, E]", "the state that enters the layer"),
    "query": ("[B, T, H, D]", ATTENTION["query_HTD"]),
    "key": ("[B, T, G, D]", ATTENTION["key_GTD"]),
    "value": ("[B, T, G, D]", ATTENTION["value_GTD"]),
    "out": ("[B, T, H, D]", ATTENTION["out_HTD"]),
    "gated_out": ("[B, T, H, D]", "`out` times an explicit gate, before the output projection"),
    "attention_branch": ("[B, T, E]", BRANCHES["attention_branch_TE"]),
    "middle": ("[B, T, E]", "the state between attention and MLP; read-only"),
    "mlp_hidden": ("[B, T, F]", "the input of the last projection of the MLP"),
    "mlp_branch": ("[B, T, E]", BRANCHES["mlp_branch_TE"]),
    "output": ("[B, T, E]", "the state that leaves the layer"),
}
"""Place in a layer -> shape and meaning."""
STATISTICS = {
    name.removesuffix("_HT"): ("[B, T, H]", f"{text}; read-only")
    for name, text in ATTENTION.items()
    if name.endswith("_HT")
}
"""The same for the attention statistics that `run_with_cache` also accepts."""

Touch = Callable[[Tensor], Tensor | None]
Change = Tensor | float | Touch
_OF_ATTENTION = ("query", "key", "value", "out")
_OF_HEADS = (*_OF_ATTENTION, "gated_out")
_STATE = (0, "hidden_states")
_NUMBERS = itertools.count()


class _Place(NamedTuple):
    """An argument (position, name) or the output of a module, or of attention if there is none."""

    module: Any = None
    argument: tuple[int, str] | None = None
    heads: int = 0  # in the last dimension; 0 for none
    in_megatron: bool = False  # [S, B, ...], and a bias to add may follow an output


def activation_names(model: Any) -> dict[str, str]:
    """Return the names of a model's activations, each with its shape and meaning."""
    known = _known(open_probe_on(model)(Listener()))
    return {name: ": ".join((PLACES | STATISTICS)[name.rpartition(".")[2]]) for name in known}


def run_with_cache(
    model: Any, tokens: Any, names: str | Iterable[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a model on token ids, and return its logits and the activations of these names.

    Args:
        model: as for `zero_heads`. It may be within a context, such as `zero_heads` or `hooks`.
        tokens: ids [T] or [B, T] without padding: a tensor, array or list.
        names: of `activation_names`; `*` stands for anything, as in "layers.*.output".

    Returns:
        logits [B, T, V], and name -> copy of the tensor, on the model's device and in its dtype
        (statistics: at least float32), without gradients.

    Raises:
        UserError: an unknown name, with the nearest ones; ids that the model does not have; a
            statistic within another context, or of attention that megasink cannot read.
    """
    open_probe = open_probe_on(model)
    probe = open_probe(Listener())
    chosen, ids_BT = _chosen(names, _known(probe)), token_ids(probe.model, tokens)
    cache: dict[str, Tensor] = {}
    measured = _Statistics(filter(_is_statistic, chosen))

    def keep(name: str, tensor: Tensor) -> None:
        cache[name] = tensor.clone()

    touches = {name: partial(keep, name) for name in chosen if name not in measured.kept}
    with ExitStack() as stack, torch.no_grad():
        if measured.needs:
            probe = stack.enter_context(open_probe(measured))
        stack.enter_context(_touching(probe, touches))
        logits_BTV = probe.forward(ids_BT).logits
    cache |= {name: torch.stack(by_row) for name, by_row in measured.kept.items()}
    return logits_BTV, {name: cache[name] for name in chosen}


@contextmanager
def hooks(model: Any, changes: Mapping[str, Change]) -> Iterator[None]:
    """Replace activations of a model by name in every call within the context; contexts nest.

    Gradients flow through the new values. With a key/value cache, `key` and `value` are those of
    all tokens so far, and other places those of the new tokens.

    Args:
        model: as for `zero_heads`.
        changes: name, as for `run_with_cache` -> a number or tensor, which is broadcast, or a
            function of the tensor that returns a new one. It gets a copy: it may also write into
            that and return None.

    Raises:
        UserError: an unknown name, or one that is read only; a new value of another shape; a place
            that no call in the context computed.
    """
    probe = open_probe_on(model)(Listener())
    if not isinstance(changes, Mapping):
        raise UserError(f"changes {changes!r:.60}: give a dict of name -> new value or function")
    chosen = {n: new for given, new in changes.items() for n in _chosen(given, _known(probe))}
    touches = {name: partial(_changed, name, new) for name, new in chosen.items()}
    if fixed := [name for name in touches if name.endswith(".middle") or _is_statistic(name)]:
        raise UserError(
            f"{', '.join(fixed)}: read-only; change a tensor that is computed earlier, such as "
            "query or attention_branch"
        )
    with _touching(probe, touches):
        yield


class Activations:
    """Methods for the activations of a loaded model."""

    activation_names, run_with_cache, hooks = activation_names, run_with_cache, hooks


def token_ids(model: Any, tokens: Any) -> Tensor:
    """Return ids [B, T] on the device of a model, each a row of its embedding."""
    try:
        ids_BT = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"tokens {tokens!r:.60}: give ids [T] or [B, T] without padding") from error
    ids_BT = ids_BT[None] if ids_BT.dim() == 1 else ids_BT
    whole = ids_BT.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if not whole or ids_BT.dim() != 2 or not ids_BT.numel():
        raise UserError(f"tokens {tokens!r:.60}: give one or more whole numbers, [T] or [B, T]")
    is_megatron = not hasattr(model, "get_input_embeddings")
    table = model.embedding.word_embeddings if is_megatron else model.get_input_embeddings()
    low, high, rows = int(ids_BT.min()), int(ids_BT.max()), len(table.weight)
    if low < 0 or high >= rows:
        raise UserError(f"token id {low if low < 0 else high}: the model has ids 0 to {rows - 1}")
    return ids_BT.to(table.weight.device, torch.long)


class _Statistics(Listener):
    """Appends the statistics of each row to a list."""

    def __init__(self, names: Iterable[str]):
        self.kept: dict[str, list[Tensor]] = {name: [] for name in names}
        self.needs = {f"{name.rpartition('.')[2]}_HT" for name in self.kept}

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        for name, tensor_HT in statistics.items():
            if (full := f"layers.{layer}.{name.removesuffix('_HT')}") in self.kept:
                self.kept[full].append(tensor_HT.t().clone())


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS


def _chosen(names: Any, known: Iterable[str]) -> list[str]:
    """Return the matching names, each once."""
    chosen, several = list[str](), isinstance(names, Iterable) and not isinstance(names, str)
    for word in (list(names) or [None]) if several else [names]:
        found = fnmatch.filter(known, str(word))
        if not found:
            near = nearest(word, known, cutoff=0.6)
            meant = f"did you mean {near}? " if near else ""
            raise UserError(
                f"activation {word!r:.60} is unknown: {meant}activation_names(model) lists all"
            )
        chosen += found
    return list(dict.fromkeys(chosen))


def _changed(name: str, change: Change, tensor: Tensor) -> Tensor:
    """Return a tensor after a change."""
    copy = tensor.clone()
    new = change(copy) if callable(change) else change
    try:
        value = copy if new is None and callable(change) else torch.as_tensor(new).to(tensor)
        value = value if callable(change) else value.expand(tensor.shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name}: {reason_of(error)}: give a tensor or number") from error
    if value.shape != tensor.shape:
        raise UserError(f"{name}: new value of shape {list(value.shape)}, not {list(tensor.shape)}")
    return value


def _known(probe: Probe) -> dict[str, _Place]:
    """Return the places of a model by name, in order, including statistics."""
    known: dict[str, _Place] = {}
    for index, heads in enumerate(probe.heads):
        found = _places(probe, probe.layers[index], heads)
        found |= dict.fromkeys(STATISTICS, _Place()) if "query" in found else {}
        known |= {f"layers.{index}.{n}": found[n] for n in PLACES | STATISTICS if n in found}
    return known


def _places(probe: Probe, layer: Any, heads: int) -> dict[str, _Place]:
    """Return the places of a block of transformers or of Megatron."""
    if is_block := isinstance(layer, Block):
        first = last = layer.module
        attention, mlp, projection, middle = layer.attention, layer.mlp, layer.output, layer.middle
        down = None if mlp is None else child(mlp, DOWN)
    else:
        first, last, attention, mlp = layer.first, layer.last, layer.attention, layer.mlp
        projection, down = getattr(attention, "linear_proj", None), getattr(mlp, "linear_fc2", None)
        middle = layer.ffn.pre_mlp_layernorm if None not in (layer.mixer, mlp) else None
    outputs = {"output": last, "attention_branch": attention, "mlp_branch": mlp}
    inputs = {"input": first, "middle": middle, "mlp_hidden": down}
    place = partial(_Place, in_megatron=not is_block)
    found = {name: place(of) for name, of in outputs.items() if of is not None}
    found |= {name: place(of, _STATE) for name, of in inputs.items() if of is not None}
    if projection is None:
        return found
    one = getattr(probe.model.config, "multi_head_addition", False)  # it reads the sum of the heads
    found["gated_out"] = place(projection, _STATE, 1 if one else heads)
    if not is_block:
        core = attention.core_attention  # type: ignore[union-attr]  # it has a projection
        found |= {name: place(core, (i, name)) for i, name in enumerate(_OF_ATTENTION[:3])}
        found["out"] = place(core, None, heads)
    elif decoder_of(probe.model)._can_set_attn_implementation():
        found |= dict.fromkeys(_OF_ATTENTION, _Place())
    return found


@contextmanager
def _touching(probe: Probe, touches: Mapping[str, Touch]) -> Iterator[None]:
    """Let functions see, and replace, the tensors of these names in every call of the model."""
    known, missed, opened = _known(probe), dict(touches), [True]

    def check(_: Tensor) -> None:
        if not opened:
            raise UserError(
                "gradient checkpointing runs the layers again in the backward pass: call "
                "backward() inside the context of hooks"
            )

    def touch(name: str, tensor: Tensor) -> Tensor | None:
        missed.pop(name, None)
        if (new := touches[name](tensor)) is not None:
            checkpoints = getattr(probe.model, "is_gradient_checkpointing", False)
            if checkpoints and probe.model.training and new.requires_grad:
                new.register_hook(check)
        return new

    in_attention = {n: partial(touch, n) for n in touches if known[n].module is None}
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # as in TransformersProbe
        stack.callback(opened.clear)
        for name in touches.keys() - in_attention.keys():
            stack.callback(_hooked(name, known[name], partial(touch, name)).remove)
        stack.enter_context(_attending(probe, in_attention))
        yield
    if missed:
        raise UserError(
            f"no call of the model in this context computed {', '.join(missed)}: run the model "
            "inside the context, or leave the name out"
        )


def _hooked(name: str, place: _Place, touch: Touch) -> Any:
    """Register the hook of one place."""
    argument, dimensions = place.argument, 4 if name.rpartition(".")[2] in _OF_HEADS else 3

    def seen(tensor: Tensor) -> Tensor | None:
        ours = tensor.transpose(0, 1) if place.in_megatron else tensor
        ours = ours.unflatten(-1, (place.heads, -1)) if place.heads else ours
        if ours.dim() != dimensions:  # several residual streams, or rows and tokens in one axis
            raise UserError(f"{name} has shape {list(tensor.shape)}, not [B, T, ...]: leave it out")
        if (new := touch(ours)) is None:
            return None
        return (new.transpose(0, 1) if place.in_megatron else new).reshape(tensor.shape)

    def after(_: Any, args: Any, output: Any) -> Any:
        tensor, *others = output if isinstance(output, tuple) else (output,)
        if place.in_megatron and others and isinstance(others[0], Tensor):
            tensor, others = tensor + others[0], [None]
        new = seen(tensor)
        return None if new is None else (new, *others) if isinstance(output, tuple) else new

    if argument is None:
        return place.module.register_forward_hook(after)
    return hook_input(place.module, seen, *argument)


@contextmanager
def _attending(probe: Any, touches: Mapping[str, Touch]) -> Iterator[None]:
    """Call functions with the inputs and outputs of transformers' attention, [B, T, heads, D]."""
    if not touches:
        yield
        return
    base = decoder_config(probe.model)._attn_implementation
    layers = {id(block.attention): i for i, block in enumerate(probe.layers) if block.attention}

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        def seen(name: str, tensor: Tensor) -> Tensor:
            touch = touches.get(f"layers.{layers.get(id(module))}.{name}")
            new = None if touch is None else touch(tensor)
            return tensor if new is None else new

        given = zip(_OF_ATTENTION, (query, key, value), strict=False)
        ours = [seen(name, tensor.transpose(1, 2)).transpose(1, 2) for name, tensor in given]
        out_BTHD, weights = attention_of(base, module)(module, *ours, *args, **kwargs)
        return seen("out", out_BTHD), weights

    with replaced_attention(probe.model, f"megasink_hooks_{next(_NUMBERS)}", attend):
        yield
