"""Activations by name: what torch's own hooks see, what they are computed from, and new values."""

import re
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import megasink
from megasink.analysis.interventions.activations import PLACES, STATISTICS
from tests.analysis.capture.tiny_models import ARCHITECTURES, tiny_model
from tests.distributed.layout import SINGLE
from tests.megatron.test_hybrid import DELTA_NET, MOE

IDS = torch.tensor([[7, 3, 3, 9, 12, 30, 7], [5, 11, 2, 2, 40, 41, 6]])
TASKS = "tests.analysis.interventions.megatron_tasks"
DOCS = Path(__file__).resolve().parents[3] / "docs"
ADDING = {"llama", "qwen3-moe", "gpt-oss", "mistral", "gpt-2"}  # no norms of branches
EAGER = {"gpt-oss": "eager", "granite-swa": "eager", "flint": "eager", "own-sink": "eager"}


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids, use_cache=False).logits


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", num_hidden_layers=3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reading_and_rewriting_change_nothing(name):
    model = tiny_model(name, EAGER.get(name))
    implementation, plain = model.config._attn_implementation, logits(model)
    names = megasink.activation_names(model)
    found, cache = megasink.run_with_cache(model, IDS, "*")
    assert torch.equal(found, plain)
    assert list(cache) == list(names)
    sizes = {"B": 2, "T": 7, "E": 32, "H": 4}
    for place, tensor in cache.items():
        letters = re.findall(r"\w", names[place].partition(":")[0])
        expected = [sizes.get(n, size) for n, size in zip(letters, tensor.shape, strict=True)]
        assert list(tensor.shape) == expected, place
    with megasink.hooks(model, {n: lambda x: x for n in names if "read-only" not in names[n]}):
        assert torch.equal(logits(model), plain)
    assert model.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for layer in {n.split(".")[1] for n in names} if name in ADDING else ():
        at = {n.split(".")[2]: cache[n] for n in names if n.startswith(f"layers.{layer}.")}
        torch.testing.assert_close(at["middle"], at["input"] + at["attention_branch"])
        torch.testing.assert_close(at["output"], at["middle"] + at["mlp_branch"])


def test_they_are_what_hooks_of_torch_see(llama):
    """GQA: 4 query heads share 2 keys and values."""
    seen, layer = {}, llama.model.layers[1]
    for name, module in {
        "output": layer,
        "attention_branch": layer.self_attn,
        "mlp_branch": layer.mlp,
        "q": layer.self_attn.q_proj,
        "k": layer.self_attn.k_proj,
        "v": layer.self_attn.v_proj,
    }.items():

        def after(_, args, output, name=name):
            seen[name] = output[0] if isinstance(output, tuple) else output

        module.register_forward_hook(after)
    for name, module in {
        "middle": layer.post_attention_layernorm,
        "mlp_hidden": layer.mlp.down_proj,
        "gated_out": layer.self_attn.o_proj,
    }.items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(input=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    logits(llama)
    cache = megasink.run_with_cache(llama, IDS, "layers.1.*")[1]
    for module in llama.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    at = {name.removeprefix("layers.1."): tensor for name, tensor in cache.items()}
    for name in seen.keys() - {"q", "k", "v"}:
        assert torch.equal(at[name].flatten(2), seen[name]), name
    # Attention by hand, from what the projections returned.
    query, key, value = (seen[n].unflatten(-1, (-1, 8)).transpose(1, 2) for n in "qkv")
    rotary = llama.model.rotary_emb(query, torch.arange(7)[None])
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        torch.testing.assert_close(at[name], tensor.transpose(1, 2))
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = (query @ key.mT * 8**-0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    weights_BHTT = scores.softmax(-1)
    torch.testing.assert_close(at["out"], (weights_BHTT @ value).transpose(1, 2))
    for name, tensor in {
        "first_weight": weights_BHTT[..., 0],
        "column_sum": weights_BHTT.sum(2),
    }.items():
        torch.testing.assert_close(at[name].float(), tensor.transpose(1, 2))


def test_a_state_from_another_prompt_makes_its_logits(llama):
    other = IDS.flip(1)
    state = megasink.run_with_cache(llama, other, "layers.1.output")[1]
    with megasink.hooks(llama, state):
        assert torch.equal(logits(llama), logits(llama, other))
        torch.testing.assert_close(logits(llama, other), logits(llama))


def test_new_values_do_what_interventions_do(llama):
    def zero_head(tensor):
        tensor[:, :, 2] = 0  # a copy: returned or not

    with megasink.zero_heads(llama, "1.2"):
        zeroed = logits(llama)
        seen = megasink.run_with_cache(llama, IDS, "layers.1.gated_out")[1]["layers.1.gated_out"]
        assert not seen[:, :, 2].any()
        assert seen[:, :, 1].any()
        with pytest.raises(megasink.UserError, match="another probe or intervention is open"):
            megasink.run_with_cache(llama, IDS, "layers.1.gate")
        with megasink.hooks(llama, {"layers.1.gated_out": 0.0}):
            assert not torch.equal(logits(llama), zeroed)
    for place in ("out", "gated_out"):
        with megasink.hooks(llama, {f"layers.1.{place}": zero_head}):
            assert torch.equal(logits(llama), zeroed)
    with megasink.drain_first_value(llama):
        drained = logits(llama)
    first = torch.ones(7, 1, 1)
    first[0] = 0
    with megasink.hooks(llama, {"layers.*.value": lambda value: value * first}):
        torch.testing.assert_close(logits(llama), drained, atol=1e-5, rtol=1e-5)
    with megasink.hooks(llama, {"layers.2.query": 0.0}):  # scores of 0: the mean of the values
        at = megasink.run_with_cache(llama, IDS, ["layers.2.out", "layers.2.value"])[1]
    values = at["layers.2.value"].repeat_interleave(2, 2).cumsum(1)
    mean = values / torch.arange(1, 8)[None, :, None, None]
    torch.testing.assert_close(at["layers.2.out"], mean)


def test_gradients_and_caches(llama):
    steer = torch.zeros(32, requires_grad=True)
    with megasink.hooks(llama, {"layers.0.output": lambda state: state + steer}):
        llama(IDS).logits.square().sum().backward()
        generated = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        tokens = llama.generate(IDS, **generated)
        assert torch.equal(tokens, llama.generate(IDS, **generated, use_cache=False))
    assert steer.grad.abs().min() > 0
    llama.zero_grad()
    llama.to(torch.bfloat16)
    cache = megasink.run_with_cache(llama, IDS, ["layers.0.key", "layers.0.gate"])[1]
    llama.to(torch.float32)
    assert [tensor.dtype for tensor in cache.values()] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("run_with_cache", IDS, "layers.0.outputs"), r"mean layers\.0\.output"),
        (("run_with_cache", IDS, "blocks.1.attn.hook_pattern"), "unknown: activation_names"),
        (("run_with_cache", IDS, "layers.3.output"), "did you mean"),
        (("run_with_cache", IDS, []), "activation None is unknown"),
        (("run_with_cache", IDS, 5), "activation 5 is unknown"),
        (("run_with_cache", [[1], [1, 2]], "layers.0.output"), "without padding"),
        (("run_with_cache", [0.5], "layers.0.output"), "whole numbers"),
        (("run_with_cache", [], "layers.0.output"), "whole numbers"),
        (("run_with_cache", "text", "layers.0.output"), "give ids"),
        (("run_with_cache", [64], "layers.0.output"), "token id 64: the model has ids 0 to 63"),
        (("hooks", {"layers.0.middle": 0.0}), r"layers\.0\.middle: read-only"),
        (("hooks", {"layers.0.gate": 0.0}), "read-only"),
        (("hooks", ["layers.0.output"]), "give a dict"),
        (("hooks", {"layers.0.output": torch.zeros(5)}), r"layers\.0\.output: .*give a tensor"),
        (("hooks", {"layers.0.output": "x"}), "give a tensor or number"),
        (("hooks", {"layers.0.output": None}), "give a tensor or number"),
        (("hooks", {"layers.0.output": lambda x: x[:1]}), r"shape \[1, 7, 32\], not \[2, 7, 32\]"),
    ],
)
def test_wrong_calls(llama, call, message):
    plain = logits(llama)
    name, *arguments = call
    with pytest.raises(megasink.UserError, match=message):  # noqa: PT012
        called = getattr(megasink, name)(llama, *arguments)
        with called:
            logits(llama)
    assert torch.equal(logits(llama), plain)


def test_a_place_that_no_call_comes_by(llama):
    with (
        pytest.raises(megasink.UserError, match=r"in this context computed layers\.0\.key:"),
        megasink.hooks(llama, {"layers.0.key": 0.0}),
    ):
        pass
    assert not llama.model.layers[0]._forward_pre_hooks


RUNS = {
    "vanilla": {"attention_variant": "vanilla"},
    "sink": {"num_query_groups": 2},
    "elementwise": {"attention_variant": "gated", "gate_granularity": "elementwise"},
    "kv-bias": {"attention_variant": "kv-bias"},
    "multi-head-addition": {"multi_head_addition": True},
    "post-norm": {"post_norm": True},
}


@pytest.mark.parametrize("kind", RUNS)
def test_runs(pool, kind):
    (report,) = pool.run(f"{TASKS}:activations", SINGLE, **RUNS[kind])
    assert report == dict.fromkeys(report, True)
    assert len(report) >= 8


@pytest.mark.parametrize(
    ("options", "has", "has_not"),
    [
        (
            {"pattern": "G*-", **DELTA_NET},
            {"layers.0.output", "layers.1.query", "layers.1.gate", "layers.1.mlp_hidden"},
            {"layers.0.query", "layers.0.mlp_branch", "layers.0.middle", "layers.2.output"},
        ),
        (
            MOE,
            {"layers.1.mlp_branch", "layers.1.middle", "layers.1.first_weight"},
            {"layers.1.mlp_hidden"},
        ),
    ],
    ids=["hybrid", "experts"],
)
def test_layers_of_other_kinds(pool, options, has, has_not):
    (names,) = pool.run(f"{TASKS}:places", SINGLE, **options)
    assert has <= {*names}
    assert not has_not & {*names}


def test_the_pages_list_the_names():
    page = (DOCS / "interventions.md").read_text()
    for name, (shape, _) in (PLACES | STATISTICS).items():
        assert f"| `{name}` | {shape} |" in page
    lens = (DOCS / "coming-from-transformerlens.md").read_text()
    mapped = re.findall(r"^\| `blocks\.L\.[\w.]+` \| `layers\.L\.(\w+)`", lens, re.M)
    assert {*mapped} == {*PLACES} - {"out"}
