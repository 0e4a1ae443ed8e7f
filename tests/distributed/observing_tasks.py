"""Tasks for the workers: what a step that is observed records, and the definition of it.

Shapes: L layers, H query heads.
"""

import contextlib
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor

from megasink.balance.gate_sums import BALANCE_GRADIENT, OTHER_GRADIENT, SERIES
from megasink.megatron import head_observer
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.gated_attention import GatedSelfAttention
from megasink.megatron.model import MegasinkModelBuilder
from tests.distributed import masked_gpt, oracle, tiny_gpt
from tests.distributed.cases import DOCUMENTS, PADDED

TOKENS = tiny_gpt.MICROBATCHES * tiny_gpt.MICROBATCH * tiny_gpt.SEQUENCE


def observed_step(documents: bool = False, **options: Any) -> dict[str, Any]:
    """The series of one step, and how many numbers were reduced with and without observing.

    Gradients are those of the mean loss of the global batch, and beside them the gradient of the
    parameter that the bias is, where the model has one.
    """
    tokens, reading = TOKENS, contextlib.nullcontext
    if documents:
        tokens = sum(map(sum, PADDED["real"]))
        reading = partial(masked_gpt.reading, **DOCUMENTS | PADDED)
    config = tiny_gpt.model_config(**options)
    transformer = config.transformer
    models = tiny_gpt.build(config)
    optimizer, _ = tiny_gpt.optimizer_of(config, models, False)
    dp = parallel_state.get_data_parallel_world_size()
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    rows = tiny_gpt.MICROBATCH * tiny_gpt.MICROBATCHES
    init_num_microbatches_calculator(0, None, rows, tiny_gpt.MICROBATCH, dp)
    transformer.grad_scale_func = optimizer.scale_loss
    sizes = []
    heads = transformer.statistics.heads
    for heads.observes in (False, True):
        with reading():
            tiny_gpt.run_step(models, optimizer, 0)
        assert heads._pending is not None
        sizes.append(heads._pending[0].numel())
        statistics = tiny_gpt.statistics(transformer)
    report: dict[str, Any] = {"sizes": sizes, "importance": statistics.importance_LH}
    for name, values_LH in statistics.series.items():
        # Means over tokens of gradients that Megatron averages over these ranks.
        scale = tokens / ranks if name in (BALANCE_GRADIENT, OTHER_GRADIENT) else 1.0
        report[name] = values_LH * scale
    report["parameter"] = [p for model in unwrap_model(models) for p in bias_parameters(model)]
    return report


def bias_parameters(model: torch.nn.Module) -> list[tuple[int, int, Tensor]]:
    """(layer, first head, gradient of the bias [h]) of every gate whose score is a parameter.

    And of every sink, whose logit is the negative of the bias.
    """
    found = []
    for module in model.modules():
        if isinstance(module, GatedSelfAttention) and module.gate.logit is not None:
            gradient = module.gate.logit.main_grad.view(-1, module.gate.width).sum(1)
            first = len(gradient) * parallel_state.get_tensor_model_parallel_rank()
            found.append((module.layer_number - 1, first, gradient.clone()))
        elif isinstance(module, CoreAttention) and module.softmax_offset is not None:
            gradient = -module.softmax_offset.main_grad
            first = len(gradient) * parallel_state.get_tensor_model_parallel_rank()
            found.append((module.layer_number - 1, first, gradient))
    return found


def definition(coeff: float, **options: Any) -> dict[str, Tensor]:
    """The same by autograd: Eq. 7 on each microbatch of a sink model with reference attention."""
    gates: list[Tensor] = []
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    model = oracle.reference_model(config, gates)
    sinks = [m.softmax_offset for m in model.modules() if isinstance(m, CoreAttention)]
    losses, terms_ML = [], []
    every_head = [list(range(tiny_gpt.HEADS))]
    for index in range(tiny_gpt.MICROBATCHES):
        data = tiny_gpt.batch(0, index)
        found = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
        losses.append(found.mean())
        importances = [gate_BHS.mean((0, 2))[None] for gate_BHS in gates]
        terms_ML.append([oracle.balance_loss(i, coeff, every_head) for i in importances])
        gates.clear()
    loss = torch.stack(losses).mean()
    terms_L = [torch.stack(terms).mean() for terms in zip(*terms_ML, strict=True)]

    def gradients(value: Tensor) -> Tensor:
        found = torch.autograd.grad(
            value, sinks, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return -torch.stack(found)

    # [term, L, H]: a later layer's term has a gradient at the earlier sinks too.
    of_terms = torch.stack([gradients(term) for term in terms_L])
    own_LH = torch.stack([of_terms[layer, layer] for layer in range(len(sinks))])
    language_LH = gradients(loss)
    return {
        BALANCE_GRADIENT: own_LH,
        OTHER_GRADIENT: language_LH + of_terms.sum(0) - own_LH,
        "language": language_LH,
        "sink": torch.stack([sink.detach() for sink in sinks]),
    }


def layer_gradients(packed: bool, **options: Any) -> dict[str, Tensor]:
    """What one layer of core attention records, and the same by autograd at a bias."""
    config = tiny_gpt.model_config(**{"head_balance_scope": "microbatch", **options})
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = tiny_gpt.skew_sinks([MegasinkModelBuilder(config).build_model(groups)])
    core = model.train().decoder.layers[0].self_attention.core_attention
    heads, head_dim = tiny_gpt.HEADS, tiny_gpt.HIDDEN // tiny_gpt.HEADS
    generator = torch.Generator().manual_seed(4)
    bounds = [0, 5, 6, 19] if packed else [0, 19]
    query, key, value = (
        1.5 * torch.randn(19, 1, n, head_dim, generator=generator) for n in (heads, 2, 2)
    )
    grad = torch.randn(19, 1, heads * head_dim, generator=generator)
    query.requires_grad_()
    params = None
    if packed:
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
        )
    tensors = [x.squeeze(1) if packed else x for x in (query, key, value)]
    tracker = config.transformer.statistics.heads
    tracker.observes = True
    out = core(*tensors, None, packed_seq_params=params)
    out.backward(grad)
    assert tracker._table is not None
    series = tracker._table[0, 2 * heads + 3 :].view(len(SERIES), 2, heads)
    found = {n: series[SERIES.index(n), 0] for n in (BALANCE_GRADIENT, OTHER_GRADIENT)}

    bias_H = torch.zeros(heads, requires_grad=True)
    parts = [
        _biased_document(core, *(x[a:b].permute(1, 2, 0, 3) for x in (query, key, value)), bias_H)
        for a, b in pairwise(bounds)
    ]
    out_BHTD, gate_BHT = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    defined = out_BHTD.permute(2, 0, 1, 3).flatten(2) * config.transformer.attention_scale_alpha
    torch.testing.assert_close(defined, out.view_as(defined))
    balance = oracle.balance_loss(gate_BHT.mean((0, 2))[None], 1.0, [list(range(heads))])
    for name, loss in ((BALANCE_GRADIENT, balance), (OTHER_GRADIENT, (defined * grad).sum())):
        (found[f"defined {name}"],) = torch.autograd.grad(loss, bias_H, retain_graph=True)
    return found


def _biased_document(
    core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and gate of one document, every gate's logit raised by the bias of its head."""
    tokens, scale = query.shape[2], query.shape[-1] ** -0.5
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = scale * query @ key.transpose(-1, -2)
    slot_value = core.value_bias
    if core.key_bias is None:  # the slot is the first key
        first = torch.zeros(tokens).index_fill(0, torch.tensor(0), 1.0)
        scores = scores - bias_H[:, None, None] * first
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out = weights @ value
        out = out if slot_value is None else out + slot_value[:, None]
        return out, 1.0 - weights[..., 0]
    if core.config.bias_fixed_value == "uniform":
        slot_value = torch.ones(query.shape[-1])
        slot_value = core.config.bias_fixed_value_norm * slot_value / slot_value.norm()
    shape = (query.shape[1], query.shape[-1])
    key_bias, slot_value = (x.detach().expand(shape) for x in (core.key_bias, slot_value))
    logit = scale * torch.einsum("bhtd,hd->bht", query, key_bias) - bias_H[:, None]
    scores = torch.cat((logit[..., None], scores.masked_fill(~visible, -torch.inf)), dim=-1)
    weights = scores.softmax(-1)
    out = weights[..., 1:] @ value + weights[..., :1] * slot_value[:, None]
    return out, 1.0 - weights[..., 0]


def sink_rates(sequence: int, epsilon: float, **options: Any) -> dict[str, Any]:
    """Both rates of an evaluation of two microbatches, each [L, H]; and what is left behind."""
    config = tiny_gpt.model_config(**options)
    config.seq_length = sequence
    models = tiny_gpt.build(config)
    statistics = config.transformer.statistics
    head_observer.count_sinks(statistics)
    with mock.patch.object(head_observer, "SINK_EPSILON", epsilon):
        forward(models, sequence)
    rates = head_observer.sink_rates(statistics)
    forward(models, sequence)  # does not count any more
    return {"first": rates[0], "slot": rates[1], "left": 0 if statistics.sinks is None else 1}


def forward(models: list[Any], sequence: int) -> None:
    """An evaluation step through Megatron's schedule, microbatches by data-parallel rank."""
    dp = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    for model in models:
        model.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=tiny_gpt.forward_step,
            data_iterator=[iter(texts(sequence)[rank::dp]) for _ in models],
            model=models,
            num_microbatches=2 // dp,
            seq_length=sequence,
            micro_batch_size=tiny_gpt.MICROBATCH,
            forward_only=True,
        )


def texts(sequence: int) -> list[dict[str, Tensor]]:
    """Two microbatches, the same in every layout."""
    generator = torch.Generator().manual_seed(5)
    shape = (2, tiny_gpt.MICROBATCH, sequence + 1)
    tokens = torch.randint(tiny_gpt.VOCABULARY, shape, generator=generator)
    positions = torch.arange(sequence).expand(tiny_gpt.MICROBATCH, -1)
    return [
        {
            "tokens": t[:, :-1].contiguous(),
            "labels": t[:, 1:].contiguous(),
            "position_ids": positions,
            "loss_mask": torch.ones(tiny_gpt.MICROBATCH, sequence),
        }
        for t in tokens
    ]


def defined_sink_rates(sequence: int, epsilon: float, **options: Any) -> dict[str, Tensor]:
    """The same from S x S weights of every layer, over the first 64 tokens."""
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    config.seq_length = sequence
    model = oracle.reference_model(config, [])
    shares: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def weights(core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> None:
        q, k, v = (x[:64].permute(1, 2, 0, 3) for x in (query, key, value))
        one_BGSD = torch.zeros_like(v)
        one_BGSD[:, :, 0, 0] = 1.0
        out_BHSD, gate_BHS = oracle.reference_of(core, [q, k, one_BGSD], core.window)
        found = out_BHSD[..., 0].mean(-1), 1.0 - gate_BHS.mean(-1)
        shares.setdefault(core.layer_number - 1, []).append(found)

    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.register_forward_pre_hook(lambda core, inputs: weights(core, *inputs))
    model.eval()
    with torch.no_grad():
        for data in texts(sequence):
            model(data["tokens"], data["position_ids"], None, labels=data["labels"])

    def rates(which: int) -> Tensor:
        by_layer = [torch.cat([s[which] for s in shares[layer]]) for layer in sorted(shares)]
        return torch.stack([(share_BH > epsilon).double().mean(0) for share_BH in by_layer])

    return {"first": rates(0), "slot": rates(1)}
