"""Tasks for the workers: interventions on a run in memory, against their definitions."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

import megasink
from megasink import intervening
from megasink.analysis.interventions import DrainFirstValue, DynamicZeroing, SteerGates, ZeroHeads
from megasink.errors import UserError
from megasink.megatron.decoding import generate
from megasink.megatron.model_blocks import blocks_in
from tests.analysis.interventions import oracle
from tests.analysis.metrics import definitions
from tests.distributed import tiny_gpt
from tests.megatron.decoding_tasks import GREEDY, model_of

TOKENS = 11
HEADS = [(0, 1), (1, 3)]


@torch.no_grad()
def errors(**options: Any) -> dict[str, float | str]:
    """By intervention the largest error of the logits, in parts of the largest logit.

    A refusal is its message. "plain" is that of no intervention, 0 only if bit for bit equal.
    """
    model = model_of(**options)
    ids = torch.randint(0, 128, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    plain = model(ids, positions, None)
    seen = _by_definition(model, ids, oracle.nothing)[1]
    scores = {
        name: [s for rows in seen for layer in rows for s in oracle.scores(name, layer)]
        for name in ("awft", "ahon_ln", "aeqd", "circuit_ahon")
    }
    taus = {name: oracle.gap(values, 0.5) for name, values in scores.items()}
    cases: dict[str, tuple[list[Any], Any]] = {
        "zero": ([ZeroHeads(HEADS)], oracle.zeroed(HEADS)),
        "drain": ([DrainFirstValue()], oracle.drained(None)),
        "drain some": ([DrainFirstValue(taus["awft"])], oracle.drained(taus["awft"])),
        "steer": ([SteerGates(HEADS, 0.5)], oracle.steered(HEADS, 0.5)),
    }
    cases |= {n: ([DynamicZeroing(n, tau)], oracle.dynamic(n, tau)) for n, tau in taus.items()}
    found: dict[str, float | str] = {}
    for name, (interventions, definition) in cases.items():
        try:
            with intervening(model, interventions):
                actual = model(ids, positions, None)
        except UserError as error:
            found[name] = str(error)
            continue
        expected = _by_definition(model, ids, definition)[0]
        assert (expected - plain).abs().max() > 1e-4, name
        found[name] = float((actual - expected).abs().max() / expected.abs().max())
    prompt = ids[0].tolist()
    with intervening(model, [ZeroHeads(HEADS)]):
        cached = generate(model, [prompt], 4, GREEDY, vocabulary=128).tokens[0]
        whole = model(torch.tensor([prompt + cached]), torch.arange(TOKENS + 4)[None], None)[0]
    assert whole[TOKENS - 1 : -1].argmax(-1).tolist() == cached
    with intervening(model, [DrainFirstValue()]):
        try:
            generate(model, [prompt], 4, GREEDY, vocabulary=128)
        except UserError as error:
            assert "read attention need whole sequences" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a drain with a cache of a run was not refused")
    with intervening(model, []):
        found["plain"] = float((model(ids, positions, None) - plain).abs().max()) * 1e9
    assert torch.equal(model(ids, positions, None), plain)
    return found


def _by_definition(
    model: Any, ids: Tensor, define: oracle.Definition
) -> tuple[Tensor, list[list[definitions.Layer]]]:
    """The logits, and what attention did in each layer and sequence before the intervention."""
    held: list[Any] = []
    seen: list[list[definitions.Layer]] = []
    hooks = []

    def attended(core: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        held.append((core, [named[n].permute(1, 2, 0, 3) for n in ("query", "key", "value")]))

    def project(attention: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        core, inputs = held.pop()
        gated_SBX, rows, changed = args[0], [], []
        weight = attention.linear_proj.weight.detach().t()
        for row in range(gated_SBX.shape[1]):
            query, key, value = (x[row] for x in inputs)
            gated_HTD = gated_SBX[:, row].double().unflatten(-1, (len(query), -1)).transpose(0, 1)
            layer = definitions.layer_of(
                *(query, key, value, weight.unflatten(0, (len(query), -1))),
                scale=query.shape[-1] ** -0.5,
                window=core.window,
                sink_H=core.softmax_offset,
            )
            if getattr(attention, "gate", None) is not None:
                layer.gate_HTX = gated_HTD / layer.out_HTD
            rows.append(layer)
            changed.append(define(len(seen), layer).transpose(0, 1).flatten(1))
        seen.append(rows)
        return (torch.stack(changed, 1).to(gated_SBX.dtype), *args[1:])

    for block in blocks_in(model):
        attention = block.attention
        hooks.append(attention.core_attention.register_forward_hook(attended, with_kwargs=True))
        hooks.append(
            attention.linear_proj.register_forward_pre_hook(
                lambda _, args, attention=attention: project(attention, args)
            )
        )
    try:
        positions = torch.arange(ids.shape[1]).expand(*ids.shape)
        return model(ids, positions, None), seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def activations(**options: Any) -> dict[str, bool]:
    """What holds of the activations of a run by name."""
    model = model_of(**options)
    ids = torch.randint(0, 128, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    plain = model(ids, positions, None)
    names = megasink.activation_names(model)
    seen: dict[str, Tensor] = {}
    block = blocks_in(model)[1]
    core, out = block.attention.core_attention, block.attention.linear_proj
    handles = [
        block.last.register_forward_hook(lambda _, args, output: seen.update(output=output[0])),
        # Megatron adds the stream to it in place.
        block.mlp.register_forward_hook(
            lambda _, args, output: seen.update(mlp_branch=output[0].clone(), bias=output[1])
        ),
        out.register_forward_pre_hook(lambda _, args: seen.update(gated_out=args[0])),
        core.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(
                zip(("query", "key", "value"), [*args, *kwargs.values()], strict=False)
            ),
            with_kwargs=True,
        ),
    ]
    logits, cache = megasink.run_with_cache(model, ids, list(names))
    for handle in handles:
        handle.remove()
    at = {name.split(".")[2]: tensor for name, tensor in cache.items() if ".1." in name}
    if (bias := seen.pop("bias")) is not None:
        seen["mlp_branch"] += bias
    report = {"plain": torch.equal(logits, plain)}
    report |= {
        name: torch.equal(at[name].transpose(0, 1).reshape(tensor.shape), tensor)
        for name, tensor in seen.items()
    }
    report["groups"] = at["key"].shape[2] == model.config.num_query_groups
    report["weights"] = bool(at["first_weight"].shape == at["query"].shape[:3])
    if not options.get("post_norm"):
        report["sum"] = torch.allclose(at["input"] + at["attention_branch"], at["middle"])
        report["sums"] = torch.allclose(at["middle"] + at["mlp_branch"], at["output"])
    written = [name for name in names if "read-only" not in names[name]]
    with megasink.hooks(model, {name: lambda tensor: tensor for name in written}):
        report["rewritten"] = torch.equal(model(ids, positions, None), plain)
    state = megasink.run_with_cache(model, ids.flip(1), "layers.0.output")[1]
    with megasink.hooks(model, state):
        patched = model(ids, positions, None)
    report["patched"] = torch.equal(patched, model(ids.flip(1), positions, None))
    if not options.get("multi_head_addition"):
        with megasink.zero_heads(model, "1.3"):
            zeroed = model(ids, positions, None)

        def zero(tensor: Tensor) -> None:
            tensor[:, :, 3] = 0

        with megasink.hooks(model, {"layers.1.gated_out": zero}):
            report["zeroed"] = torch.equal(model(ids, positions, None), zeroed)
    return report


@torch.no_grad()
def places(**options: Any) -> list[str]:
    """Names of the activations of a model of any layers; reading and rewriting change nothing."""
    config = tiny_gpt.model_config(**options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups).eval()
    ids = torch.randint(0, 128, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    plain = model(ids, positions, None)
    names = megasink.activation_names(model)
    assert torch.equal(megasink.run_with_cache(model, ids, names)[0], plain)
    written = [name for name in names if "read-only" not in names[name]]
    with megasink.hooks(model, {name: lambda tensor: tensor for name in written}):
        assert torch.equal(model(ids, positions, None), plain)
    return list(names)
