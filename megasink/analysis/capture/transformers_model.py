"""Capture statistics from a transformers model through its attention and mask interfaces.

The model's own attention function runs on its unmodified inputs and mask, so without changes the
logits are bit-identical. A probe that reads no attention leaves it alone.

Shapes: B rows, T tokens, H query heads, G key/value groups, D head dim, E hidden size.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasink.analysis.capture.attention_statistics import AttentionCall
from megasink.analysis.capture.first_block_tensors import Sites, tensor_of, transformers_sites
from megasink.analysis.capture.head_changes import ForwardPass, HeadChange
from megasink.analysis.capture.probe import Listener, Probe
from megasink.analysis.capture.segments import (
    Segment,
    check_mask,
    refuse_chosen_keys,
    segments_of,
    whole_rows,
)
from megasink.errors import UserError
from megasink.transformers.decoder_blocks import (
    Block,
    check_gated,
    child,
    decoder_config,
    decoder_of,
    eager_function,
    find_blocks,
    gate_reader,
    output_weight,
)
from megasink.transformers.kv_cache import cache_of

# Features of megasink's modeling file that the capture supports only in Megatron runs.
_OF_OUR_OWN = ("needs_scores", "multi_head_addition", "post_norm")
NAME = "megasink_probe"
_BASES = ("sdpa", "eager")


class TransformersProbe(Probe):
    """A probe of a transformers decoder in evaluation mode; keeps its attention (sdpa or eager)."""

    def __init__(
        self, model: PreTrainedModel, listener: Listener, changes: Sequence[HeadChange] = ()
    ):
        reads = bool(listener.needs) or any(change.reads_attention for change in changes)
        problems = model_problems(model) if reads else []
        if changes and getattr(model.config, "multi_head_addition", False) and not problems:
            problems = [
                f"{type(model).__name__} has multi_head_addition: its output projection gets the "
                "sum of the heads, so single heads cannot be changed"
            ]
        super().__init__(problems, listener, changes)
        self.model: PreTrainedModel = model
        # OPT calls the decoder in its base model, and never that model itself.
        self.body: torch.nn.Module = child(model.base_model, ("decoder",)) or model.base_model
        self._attending = ExitStack()
        self._signature = inspect.signature(self.body.forward)
        self.base: str = decoder_config(model)._attn_implementation
        self.layers = find_blocks(model)
        self._readers = {
            i: gate_reader(block.attention)
            for i, block in enumerate(self.layers)
            if reads and block.attention is not None
        }
        self.heads = [block.heads for block in self.layers]
        self._index = {id(b.attention): i for i, b in enumerate(self.layers) if b.attention}
        self._inputs: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        # By identity and window; kept, since a new mask may reuse the address of a freed one.
        self._checked: dict[tuple[int, int | None], Tensor] = {}

    def _install(self) -> None:
        # A compiled model ignores hooks that are newer than its graph, and keeps those in it.
        self._attending.enter_context(torch.compiler.set_stance("force_eager"))
        if self.reads_attention:
            if NAME in AttentionInterface._global_mapping:
                raise UserError("a probe that reads attention is open: close it first")
            self._attending.enter_context(replaced_attention(self.model, NAME, self._attend))
        super()._install()

    def _uninstall(self) -> None:
        self._attending.close()

    def _output_weight(self, index: int) -> Tensor:
        return output_weight(self.layers[index].output, self.heads[index])

    def forward(
        self, ids_BT: Tensor, mask_BT: Any = None, positions_BT: Any = None, *, logits: bool = True
    ) -> Any:
        """Run the model, without `logits` only up to its output layer; pad on one side only."""
        self._seen.clear()
        model = self.model if logits else self.model.base_model
        given = {"attention_mask": mask_BT, "position_ids": positions_BT}
        with torch.set_grad_enabled(self.differentiates):
            output = model(ids_BT, use_cache=False, **given)
        missed = [i for i, heads in enumerate(self.heads) if heads and i not in self._seen]
        if missed and self.reads_attention:
            raise UserError(
                f"layers {missed} of {type(self.model).__name__} bypass transformers' attention "
                "interface: megasink cannot read their attention"
            )
        return output

    def _called(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        for extra in [name for name, value in given.items() if isinstance(value, dict)]:
            given = given[extra] | given  # the callable's **kwargs
        ids_BQ = given.get("input_ids")
        rows, new = (given["inputs_embeds"] if ids_BQ is None else ids_BQ).shape[:2]
        cache = cache_of(given)
        cached = 0 if cache is None else int(cache.get_seq_length())
        segments = [Segment(row, 0, cached + new) for row in range(rows)]
        if self.needs or self.reads_segments:
            mask_BT = given.get("attention_mask")
            if mask_BT is not None and (not isinstance(mask_BT, Tensor) or mask_BT.dim() != 2):
                raise UserError(
                    "the attention mask must be [batch, tokens]: pass such a mask, or none"
                )
            positions_BT = None if cached else given.get("position_ids")
            segments = segments_of((rows, cached + new), mask_BT, positions_BT)
        self._checked.clear()
        self._begin(ForwardPass(rows, new, cached, segments, ids_BQ))

    def sites(self) -> Sites:
        return transformers_sites(self.layers)

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in transformers' place, and report to the probe."""
        refuse_chosen_keys(module, key.shape[2], kwargs)
        function = attention_of(self.base, module)
        out_BTHD, weights = function(module, query, key, value, attention_mask, **kwargs)
        index = self._index.get(id(module))
        if index is not None:
            self._check(module, query, key, attention_mask, kwargs)
            scale, sink = kwargs.get("scaling"), kwargs.get("s_aux")
            self._calls[index] = AttentionCall(
                query,
                key,
                value,
                out_BTHD.transpose(1, 2),
                scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
                window=kwargs.get("sliding_window"),
                slot_logit_BHT=None if sink is None else sink.detach()[None, :, None],
                softcap=kwargs.get("softcap"),
                cached=self.current.cached,
            )
        return out_BTHD, weights

    def _check(
        self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        """Reject calls that the statistics do not support."""
        name, cached = type(module).__name__, self.current.cached
        queries, keys = query.shape[2], key.shape[2]
        if query.shape[1] != (heads := self.heads[self._index[id(module)]]):
            raise UserError(
                f"{name} attends with {query.shape[1]} heads, but its configuration says {heads}"
            )
        first_key = cached + queries - keys
        if (self.needs and cached) or (not cached and first_key):
            raise UserError(
                f"{name} attends from {queries} queries to {keys} keys: run whole sequences "
                "without a cache, or with one that grows (DynamicCache)"
            )
        if first_key < 0:
            raise UserError(
                f"{name} attends to {keys} keys after {cached + queries} tokens: use a cache "
                "that grows (DynamicCache), not a static one"
            )
        if kwargs.get("position_bias") is not None:
            raise UserError(f"{name} adds a position bias to its scores: megasink cannot read it")
        window = kwargs.get("sliding_window")
        if mask is None:
            causal = kwargs.get("is_causal")
            if not (getattr(module, "is_causal", True) if causal is None else causal):
                raise UserError(f"{name} is not causal: megasink supports only decoders")
            if window is not None and window < keys:
                raise UserError(
                    f"{name} has a window of {window} but no mask: use at most {window} tokens"
                )
            if cached and queries > 1:
                raise UserError(
                    f"{name} has no mask for {queries} queries after {cached} tokens: run whole "
                    "sequences without a cache"
                )
            if not whole_rows(self.segments, (query.shape[0], cached + queries)):
                raise UserError(
                    f"{name} has no mask, although the batch has padding or several documents in "
                    "one row: run the sequences one by one"
                )
        elif (id(mask), window) not in self._checked:
            problem = check_mask(mask[:, 0], self.segments, window, cached, first_key)
            if mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all()):
                problem = "it differs between heads"
            if problem:
                raise UserError(f"megasink does not support the mask of {name}: {problem}")
            self._checked[id(mask), window] = mask

    def _attach(self, index: int, block: Block) -> None:
        if "state_TE" in self.needs:
            if index == 0:
                self._before(block.module, lambda state: self._state(0, state))
            self._after(block.module, lambda state: self._state(2 * index + 2, state))
            if block.middle is not None:
                self._before(block.middle, lambda state: self._state(2 * index + 1, state))
            if block.parallel and block.attention is not None:
                self._before(block.module, lambda state: self._inputs.update({index: state}))
                self._after(
                    block.attention,
                    lambda out: self._state(2 * index + 1, self._inputs.pop(index) + out),
                )
        if block.mlp is not None and "mlp_branch_TE" in self.needs:
            self._after(block.mlp, lambda out: self._branch("mlp_branch_TE", index, out))
        if block.attention is None or block.output is None:
            return
        if not self.reads_attention:
            if self.changes:
                self._before(block.output, lambda out: self._gated(index, out))
            return
        if (reader := self._readers[index]) is not None:
            gate, read = reader
            heads = self.heads[index]
            self._after(
                gate, lambda out: self._gates.update({index: read(out, heads).transpose(1, 2)})
            )
        self._before(block.output, lambda gated: self._gated(index, gated))
        self._after(block.attention, lambda out: self._finish(index, out))

    def _after(self, module: torch.nn.Module, do: Callable[[Tensor], None]) -> None:
        super()._after(module, lambda output: do(tensor_of(output)))

    def _state(self, half: int, state_BTE: Tensor) -> None:
        if state_BTE.dim() != 3:
            name, shape = type(self.model).__name__, list(state_BTE.shape)
            raise UserError(f"{name} has several residual streams ({shape}): megasink supports one")
        super()._state(half, state_BTE)

    def _branch(self, name: str, index: int, branch_BTE: Tensor) -> None:
        rows = self.segments[-1].row + 1  # experts flatten them
        super()._branch(name, index, branch_BTE.reshape(rows, -1, branch_BTE.shape[-1]))

    def _gated(self, index: int, gated_BTX: Tensor) -> Tensor | None:
        """Store the input of the output projection (output times gate), and apply the changes."""
        rows, tokens, heads = self.current.rows, self.current.tokens, self.heads[index]
        width = gated_BTX.shape[-1]
        if width % heads or gated_BTX.numel() != rows * tokens * width:
            raise UserError(
                f"the input of the output projection of layer {index} of "
                f"{type(self.model).__name__} has shape {list(gated_BTX.shape)}, which does not "
                f"fit {tokens} tokens and {heads} heads"
            )
        gated_BTHD = gated_BTX.reshape(rows, tokens, heads, -1)  # some models flatten rows
        if (call := self._calls.get(index)) is not None:
            gated_BHTD, gate_BHTX = gated_BTHD.transpose(1, 2), self._gates.pop(index, None)
            check_gated(self.layers[index].attention, gated_BHTD, call.out_BHTD, gate_BHTX)
            if gate_BHTX is not None:
                call.gated_out_BHTD, call.explicit_gate_BHTX = gated_BHTD, gate_BHTX
        if (new_BTHD := self._changed(index, gated_BTHD)) is None:
            return None
        if call is not None:
            call.gated_out_BHTD = new_BTHD.transpose(1, 2)
        return new_BTHD.reshape(gated_BTX.shape)

    def _finish(self, index: int, branch_BTE: Tensor) -> None:
        if index in self._calls:
            self._seen.add(index)
            super()._finish(index, branch_BTE)


def attention_of(base: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function of an implementation by its name, which returns [B, T, H, D] first."""
    return eager_function(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]


@contextmanager
def replaced_attention(
    model: torch.nn.Module, name: str, function: Callable[..., Any]
) -> Iterator[None]:
    """Let a model attend by a function, under a new name, with its own mask."""
    decoder, base = decoder_of(model), decoder_config(model)._attn_implementation
    AttentionInterface.register(name, function)
    try:
        # Without a mask function of this name transformers makes no mask at all, and attention
        # silently becomes bidirectional.
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
        decoder.set_attn_implementation(name)
        yield
    finally:
        decoder.set_attn_implementation(base)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def model_problems(model: PreTrainedModel) -> list[str]:
    """Return one sentence for each reason that a model cannot be probed."""
    name, config = type(model).__name__, decoder_config(model)
    if not decoder_of(model)._can_set_attn_implementation():
        return [
            f"{name} bypasses transformers' attention interface, so megasink cannot read its "
            "attention"
        ]
    problems = []
    base = config._attn_implementation
    if base not in _BASES:
        problems.append(
            f"{name} runs with attn_implementation {base!r}: load it with {' or '.join(_BASES)}"
        )
    if model.training:
        problems.append(f"{name} is in training mode: call model.eval()")
    own = [option for option in _OF_OUR_OWN if getattr(config, option, False)]
    if own:
        problems.append(f"{name} has {', '.join(own)}: analyze the run that it was exported from")
    if base == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        problems.append(
            f"{name}: reorder_and_upcast_attn uses its own eager attention; load it with "
            "attn_implementation sdpa"
        )
    return problems
