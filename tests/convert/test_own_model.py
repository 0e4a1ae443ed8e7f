"""megasink's own modelling file against Megatron, against itself under every kernel, and alone.

Not covered: CUDA and so the kernels of GPUs, vLLM.
"""

import ast
import contextlib
import dataclasses
import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from megasink.attention.reference import (
    reference_attention,
    reference_biased_attention,
    reference_gate,
    reference_head_norm,
)
from megasink.convert.hf_config import architecture_from, config_of
from megasink.convert.megasink_model import FILES, changed_files
from megasink.convert.targets import TARGETS
from megasink.transformers.modeling import attention_megasink
from megasink.transformers.modeling.configuration_megasink import MegasinkConfig
from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM
from tests.convert.models import OWN
from tests.convert.own_models import BIASED, POSITIONED, SINKS, TOKENS, tiny
from tests.distributed.layout import SINGLE


@pytest.mark.parametrize("name", OWN)
def test_every_option_there_and_back(pool, tmp_path, name):
    bf16 = name in (
        "own-headwise",
        "own-sink-moe-qk-norm",
        "own-sink-in-windows",
        "own-sigmoid-router",
        "own-kv-bias-alibi",
        "own-t5",
    )
    (report,) = pool.run(
        "tests.convert.tasks:own_round_trip", SINGLE, folder=str(tmp_path), name=name, bf16=bf16
    )
    assert 0 < report["logits"] <= report["tolerance"]
    assert report["largest"] > 3
    assert report["argmax"] == report["generated"] == 1
    assert report["equal"]
    assert report["architecture"]
    assert not report["ran"]
    said = "\n".join(report["lines"])
    assert (
        "target: MegasinkForCausalLM (megasink): no architecture of transformers supports" in said
    )
    if bf16:
        assert "verified in bfloat16" in said
        assert "own versions of attention_megasink.py, configuration_megasink.py" in said
        assert "modeling_megasink.py, rotary_megasink.py: its files are not run" in said


def _reference(module, query, key, value, attention_mask, scaling, s_aux=None, **kwargs):
    """The definition in place of `eager_attention_forward`; it makes its own mask."""
    options = {"scale": scaling, "window": module.sliding_window}
    if module.key_bias is not None:
        shape, bias = (query.shape[1], query.shape[3]), module.slot_value
        out = reference_biased_attention(
            query,
            key,
            value,
            key_bias_HD=module.key_bias.expand(shape),
            value_bias_HD=None if bias is None else bias.expand(shape),
            **options,
        )
    else:
        sink = {} if s_aux is None else {"variant": "sink", "sink_H": s_aux}
        out = reference_attention(query, key, value, **sink, **options)
    return out.out_BHTD.transpose(1, 2), None


def _reference_gate(self, gated, hidden_states):
    score = self.logit if self.proj is None else self.proj(hidden_states)
    out, _ = reference_gate(
        gated,
        score.unflatten(-1, (-1, self.width)),
        activation=self.act.activation,
        operation=self.operation,
        shared_heads=self.act.shared_heads,
    )
    return out


@pytest.mark.parametrize("name", [n for n in OWN if n not in POSITIONED])
def test_every_gradient_is_that_of_the_definition(name):
    AttentionInterface.register("reference", _reference)
    AttentionMaskInterface.register("reference", eager_mask)
    model = tiny(name).train()
    gradients = []
    for definition in (False, True):
        model.zero_grad()
        patch = contextlib.nullcontext()
        if definition:
            model.config._attn_implementation_internal = "reference"
            patch = mock.patch.object(attention_megasink.MegasinkGate, "forward", _reference_gate)
        else:
            model.set_attn_implementation("eager")
        with patch:
            model(TOKENS, labels=TOKENS).loss.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.requires_grad})
    plain, definition = gradients
    assert all(g is not None for g in plain.values())
    for key in plain:
        size = definition[key].abs().max()
        # A bias of all keys changes no weight: without RoPE its gradient is zero but for noise.
        if not key.endswith(("k_proj.bias", "k_norm.bias")):
            assert size > 1e-6, key
        assert (plain[key] - definition[key]).abs().max() <= 1e-4 * size + 1e-7, key
    for part in ("sinks", "gate.proj.weight", "gate.logit", "key_bias", "value_bias"):
        trained = [k for k in plain if k.endswith(part)]
        assert len(trained) in (0, sum(OWN[name][1].variant_layers) or 2), trained


def test_a_sigmoid_router_is_that_of_deepseek_v3():
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=48,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    )
    ours = tiny("own-sigmoid-router").model.layers[0].mlp.gate
    theirs.load_state_dict(ours.state_dict())
    chosen = []
    for bias in (torch.zeros(4), torch.tensor([0.3, -0.2, 0.1, -0.3])):
        for router in (ours, theirs):
            router.zero_grad()
            router.e_score_correction_bias.copy_(bias)
        x = torch.randn(40, 48, generator=torch.Generator().manual_seed(2))
        computed, wanted = (
            weights.new_zeros(40, 4).scatter(1, experts, weights)
            for router in (ours, theirs)
            for _, weights, experts in [router(x)]
        )
        for probs in (computed, wanted):
            (probs * torch.arange(4.0)).sum().backward()
            chosen.append(probs > 0)
        assert torch.allclose(computed, wanted, atol=1e-6)
        assert torch.allclose(ours.weight.grad, theirs.weight.grad, atol=1e-6)
    assert not torch.equal(chosen[0], chosen[2])  # the bias changes the choice


def test_alibi_of_heads_that_are_no_power_of_two():
    slopes = attention_megasink.alibi_slopes(6)
    assert slopes == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    assert attention_megasink.alibi_slopes(12)[8:] == [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]


def test_the_norm_of_heads_is_its_definition():
    model = tiny("own-shared-rmsnorm")
    attention = model.model.layers[0].self_attn
    head = torch.randn(2, 3, 4, 16)

    def given(*args, **kwargs):
        return head, None

    model.config._attn_implementation_internal = "given"
    model.config.attention_variant = "vanilla"
    attention.gate_position = None
    with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, given=given), torch.no_grad():
        out, _ = attention(torch.randn(2, 3, 48), None, None)
        wanted = reference_head_norm(head, attention.output_norm.view(4, 16))
        assert torch.allclose(out, attention.o_proj(wanted.flatten(-2)), atol=1e-5)


@pytest.mark.parametrize("name", ["own-sink-moe-qk-norm", "own-gpt2"])
def test_zero_centred_norms_store_the_weight_minus_one(name):
    model = tiny(name)
    centred = MegasinkForCausalLM(
        MegasinkConfig(**model.config.to_dict() | {"zero_centred_norms": True})
    )
    weights = model.state_dict()
    norms = {k for k in weights if "norm" in k and k.endswith("weight")}
    centred.load_state_dict({k: w - 1 if k in norms else w for k, w in weights.items()})
    with torch.no_grad():
        assert torch.allclose(centred(TOKENS).logits, model(TOKENS).logits, atol=2e-5)
    config = config_of(
        dataclasses.replace(OWN[name][1], zero_centred=True), TARGETS["megasink"], {}
    )
    assert config["zero_centred_norms"]
    assert architecture_from(config)[0].zero_centred


def test_the_plan_of_tensor_parallelism_is_for_models_that_it_divides():
    with_plan = {name for name in OWN if tiny(name).config.base_model_tp_plan}
    without = {
        n for n in OWN if "shared-rmsnorm" in n or n in ("own-output", "own-no-input-sandwich-silu")
    }
    without |= {*BIASED, "own-v-bias-shared", "own-post-norm-head-sum"}
    without |= {name for name in OWN if "latent" in name}
    assert with_plan == set(OWN) - without


class _Tracer(torch.fx.Tracer):
    """As vLLM's transformers backend traces a layer: every submodule and the kernel are leaves."""

    def is_leaf_module(self, module, name):
        return True

    def iter(self, obj):
        of_kwargs = obj.node.op == "call_method" and obj.node.target == "keys"
        return iter(()) if of_kwargs else super().iter(obj)


def traced(module):
    """The graph of a module's forward, with one node "kernel" for the attention kernel."""

    def kernel(*args, **kwargs):
        tensors = [a for a in args if isinstance(a, torch.fx.Proxy)]
        tracer = tensors[0].tracer
        given = {k: v for k, v in kwargs.items() if isinstance(v, torch.fx.Proxy)}
        return tracer.create_proxy("call_function", kernel, tuple(tensors), given)

    cache = {"past_key_values": None} if "Attention" in type(module).__name__ else None
    with mock.patch.object(AttentionInterface, "get_interface", return_value=kernel):
        graph = _Tracer().trace(module, concrete_args=cache)
    return {node.name: node for node in graph.nodes}


@pytest.mark.parametrize("name", ["own-sink-moe-qk-norm", "own-headwise-moe", "own-query-ns"])
def test_an_inference_engine_can_trace_the_layers(name):
    layer = tiny(name).model.layers[0]
    nodes = traced(layer.self_attn)
    sink = nodes["kernel"].kwargs.get("s_aux")
    assert (sink is None) == (name not in SINKS)
    if sink is not None:
        assert (sink.op, sink.target) == ("get_attr", "sinks")
    # vLLM from 0.30 reads the expression in the source of `forward`: `self.sinks`, nothing else.
    source = textwrap.dedent(inspect.getsource(type(layer.self_attn).forward))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if ast.unparse(node.func) == "attend"]
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    assert given.get("s_aux") == (None if sink is None else "self.sinks")
    assert isinstance(getattr(layer.self_attn, "sinks", None), torch.nn.Parameter | None)
    called = {node.target for node in nodes.values() if node.op == "call_module"}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= called
    norm = traced(layer.input_layernorm)
    assert {"pow_1", "mean", "rsqrt"} <= set(norm)
    if "moe" in name:
        assert {"softmax", "topk"} <= set(traced(layer.mlp.gate))
        block = {n.target for n in traced(layer.mlp).values() if n.op == "call_module"}
        assert {"gate", "experts"} <= block


ALONE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megasink", "megatron"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, again, tokens = sys.argv[2], sys.argv[3], torch.tensor(json.loads(sys.argv[4]))
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    print("refused" if "trust_remote_code" in str(error) else error, file=sys.stderr)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
logits = model(tokens).logits
model.save_pretrained(again)
other = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True, dtype=torch.bfloat16)
base = AutoModel.from_pretrained(again, trust_remote_code=True)
assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
layer = other.model.layers[0].self_attn
made = other.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
print(json.dumps({
    "logits": logits.tolist(),
    "dtypes": [str(layer.sinks.dtype), str(layer.q_proj.weight.dtype)],
    "bf16": float((other(tokens).logits.float() - logits).abs().max()),
    "made": list(made.shape),
    "loaded": sorted(m for m in sys.modules if m.split(".")[0] in ("megasink", "megatron")),
}))
"""


def test_a_folder_loads_without_megasink(tmp_path):
    model = tiny("own-sink-moe-qk-norm")
    model.save_pretrained(tmp_path / "hf")
    assert changed_files(tmp_path / "hf") == []
    (site,) = {str(Path(torch.__file__).parents[1])}
    arguments = [json.dumps([site]), tmp_path / "hf", tmp_path / "again"]
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, *map(str, arguments), json.dumps(TOKENS.tolist())],
        capture_output=True,
        text=True,
        check=False,
        env={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
        | {"OMP_NUM_THREADS": "1"},  # as here: sums of more threads differ in a bit
    )
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stderr
    report = json.loads(done.stdout)
    with torch.no_grad():
        logits = model(TOKENS).logits
    assert torch.allclose(torch.tensor(report["logits"]), logits, atol=1e-6)
    assert report["dtypes"] == ["torch.float32", "torch.bfloat16"]
    assert 0 < report["bf16"] < 0.25
    assert report["made"] == [2, 25]
    assert report["loaded"] == []
    for folder in ("hf", "again"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_megasink.MegasinkForCausalLM"
        assert config["auto_map"]["AutoConfig"] == "configuration_megasink.MegasinkConfig"
        assert {path.name for path in FILES} <= {p.name for p in (tmp_path / folder).iterdir()}
    assert changed_files(tmp_path / "again") == []
    (tmp_path / "again" / FILES[0].name).write_text("pass\n")
    (tmp_path / "again" / FILES[1].name).unlink()
    assert changed_files(tmp_path / "again") == [FILES[0].name, FILES[1].name]
