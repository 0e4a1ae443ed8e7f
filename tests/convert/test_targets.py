"""Which target a model gets, what is refused, and that a config.json says the whole model."""

import copy
import dataclasses
import itertools
import shlex
from unittest import mock

import pytest
import transformers

from megasink.attention.variants import Export, variant, variant_registry
from megasink.convert.architecture import Yarn
from megasink.convert.architecture_of_run import architecture_of
from megasink.convert.hf_config import OURS, architecture_from, config_of
from megasink.convert.megasink_model import MegasinkOptions
from megasink.convert.megatron_weights import weight_shapes
from megasink.convert.model_flags import as_line, model_flags
from megasink.convert.targets import TARGETS, choose
from megasink.convert.weight_table import steps
from megasink.errors import UserError
from megasink.options.run_options import OPTIONS
from megasink.transformers.modeling.configuration_megasink import MegasinkConfig
from tests.convert.models import FAMILIES, MODELS, OWN
from tests.convert.tiny import DELTA_NET, MOE, model

DEFAULTS = {
    field.name: field.default for options in OPTIONS for field in dataclasses.fields(options)
}
PLAIN_FFN = MegasinkOptions(gated_unit=False)
GAINLESS = MegasinkOptions(norm_without_gain=True)
HALF_ROPE = MegasinkOptions(rotary_percent=0.5)
# Arguments of a run of a small Llama, as config.json has them.
SAVED = DEFAULTS | {
    "attention_variant": "vanilla",
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 40,
    "padded_vocab_size": 128,
    "untie_embeddings_and_output_weights": True,
    "max_position_embeddings": 96,
    "layernorm_epsilon": 1e-5,
    "rotary_base": 10000,
    "qk_layernorm": False,
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
}


@pytest.mark.parametrize("name", [name for name in MODELS | OWN if name not in FAMILIES])
def test_the_first_target_that_fits_is_taken(name):
    target, architecture = (MODELS | OWN)[name]
    chosen, why = choose(architecture)
    assert chosen.name == target
    assert architecture.attention in why


@pytest.mark.parametrize("name", MODELS | OWN)
def test_a_config_says_the_whole_model(name):
    target, architecture = (MODELS | OWN)[name]
    config = config_of(architecture, TARGETS[target], {"eos_token_id": 1})
    assert architecture_from(config) == (architecture, TARGETS[target])
    if architecture.attention in ("off-by-one", "headwise") and target not in ("lfm3", "megasink"):
        # Not without what only we read: Qwen's gates are elementwise, Granite's sinks learned.
        del config[OURS]
        other, _ = architecture_from(config)
        assert other.attention in ("sink", "elementwise")


@pytest.mark.parametrize("name", MODELS | OWN)
def test_every_weight_has_one_row_and_every_name_one_weight(name):
    target, architecture = (MODELS | OWN)[name]
    table = TARGETS[target].table(architecture)
    keys = [key for row in table for key in row.megatron]
    assert sorted(keys) == sorted(weight_shapes(architecture))
    todo = steps(table, architecture.layers, architecture.experts)
    names = list(itertools.chain.from_iterable(step.hf for step in todo))
    assert len(names) == len(set(names))
    assert not [n for n in names if "{" in n]


@pytest.mark.parametrize(
    ("change", "target", "reason"),
    [
        ({"attention": "sink"}, "llama", "it has vanilla attention, not sink"),
        ({}, "qwen3", "it has qk-norm"),
        ({"qk_norm": True}, "llama", "it has no qk-norm"),
        ({**MOE}, "llama", "it has no experts"),
        ({}, "mixtral", "it has experts"),
        ({"bias": True, "qkv_bias": True}, "qwen2", "no biases"),
        ({"qkv_bias": True}, "llama", "biases in the query, key and value projections alone"),
        ({}, "qwen2", "projections have biases"),
        ({"windows": (5, None)}, "llama", "no sliding window"),
        ({**MOE, "windows": (5, None)}, "mixtral", "all have the same window"),
        ({"attention": "sink", "windows": (5, 6)}, "granite_swa", "windows all have the same size"),
        ({**MOE, "shared_ffn": 8}, "mixtral", "no ungated shared expert"),
        ({**MOE, "shared_ffn": 8, "shared_gate": True}, "granitemoe_swa", "has no gate"),
        ({"delta_net": DELTA_NET, "linear_layers": (True, False)}, "megasink", "no gated delta-n"),
        ({"delta_net": DELTA_NET, "linear_layers": (True, False)}, "llama", "no gated delta-net"),
        ({**MOE, "renormalize": False}, "mixtral", "sum to one"),
        (
            {"attention": "headwise", "qk_norm": True, "rope_factor": 8.0},
            "lfm3",
            "no llama3 RoPE scaling",
        ),
        ({"attention": "headwise", "qk_norm": True, "activation": "relu"}, "lfm3", "silu, not"),
        ({"options": MegasinkOptions(sandwich_norm=True)}, "llama", "it has no --sandwich-norm"),
        ({"options": PLAIN_FFN}, "llama", "its FFN is gated"),
        ({"activation": "relu2"}, "nanochat", "it has --norm-without-gain; .*is not gated"),
        ({"windows": (5, None)}, "mistral", "all have the same window"),
        ({"qk_norm": True, "options": GAINLESS}, "megasink", "its qk-norm has gains"),
        ({**MOE, "options": PLAIN_FFN}, "megasink", "experts are gated"),
        ({"windows": (5, 6)}, "megasink", "windows all have the same size"),
        ({"rope_factor": 8.0, "options": HALF_ROPE}, "megasink", "whole heads"),
    ],
)
def test_what_does_not_fit_a_target_is_said(change, target, reason):
    with pytest.raises(UserError, match=reason):
        choose(model(**change), target)


def test_a_model_that_no_target_is_names_the_nearest():
    target, why = choose(model(attention="elementwise"))
    assert target.name == "megasink"
    for words in (
        "no architecture of transformers supports",
        "qwen3_5_text: it has qk-norm",
        "trust_",
    ):
        assert words in why
    with pytest.raises(UserError, match="megasink: its experts have no biases"):
        choose(model(attention="sink", bias=True, qkv_bias=True, **MOE))
    target, why = choose(model(), "megasink")
    assert (target.name, why) == ("megasink", "requested")
    with pytest.raises(UserError, match="choose llama"):
        choose(model(), "gpt2")


def test_a_variant_that_the_modeling_files_do_not_implement_is_refused():
    record = dataclasses.replace(variant("sink"), name="other-sink", export=Export())
    with (
        mock.patch.dict(variant_registry._VARIANTS, {record.name: record}),
        pytest.raises(UserError, match="megasink: it has no other-sink attention"),
    ):
        choose(model(attention="other-sink"))


def test_arguments_of_a_run_give_its_architecture():
    decoder, problems = architecture_of(SAVED, 101)
    assert problems == []
    assert decoder == dataclasses.replace(model(), layers=4, windows=(None,) * 4, init_std=0.02)
    windows = {"window_size": [4, 0], "window_attn_skip_freq": 2}
    decoder, _ = architecture_of(SAVED | windows, None)
    assert decoder.windows == (5, None, 5, None)
    assert decoder.vocabulary == 128
    decoder, _ = architecture_of(SAVED | windows | {"window_attn_skip_freq": [0, 1, 1, 0]}, None)
    assert decoder.windows == (None, 5, 5, None)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("attention_similarity", "sigmoid", "--attention-similarity sigmoid"),
        ("switch_heads", "value", "--switch-heads value has no counterpart in Hugging Face"),
        ("sink_token", True, "--sink-token True"),
        ("attention_bias_type", "rope", "--attention-bias-type rope"),
        ("prefix_lm_tokens", 8, "--prefix-lm-tokens 8"),
        ("gate_activation", "tanh", "--gate-activation tanh has no counterpart"),
        ("swiglu", False, "no target supports its FFN activation"),
        ("activation_func_clamp_value", 7.0, "without offset"),
        ("glu_linear_offset", 1.0, "without offset"),
        ("position_embedding_type", "mrope", "--position-embedding-type mrope"),
        ("rotary_interleaved", True, "--rotary-interleaved True"),
        ("moe_shared_expert_glu_interleave_size", 8, "--moe-shared-expert-glu-interleave-size 8"),
        ("moe_router_load_balancing_type", "sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
    ],
)
def test_what_transformers_has_not_is_refused_by_name(option, value, said):
    gated = {"attention_variant": "gated"} if option.startswith("gate") else {}
    (problem,) = architecture_of(SAVED | gated | {option: value}, 101)[1]
    assert said in problem


def test_an_option_of_the_start_says_nothing_of_a_trained_model():
    assert architecture_of(SAVED | {"zero_init_outputs": True}, 101)[1] == []


def test_the_modelling_file_has_the_options_and_defaults_of_the_package():
    """It stands alone beside the weights, so it names them once more."""
    config = MegasinkConfig()
    for field in dataclasses.fields(MegasinkOptions):
        assert getattr(config, field.name) == field.default, field.name


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
NO_ROPE: dict = {"rope_parameters": None}
BY_LAYER = {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}


@pytest.mark.parametrize(
    ("target", "change", "said"),
    [
        ("llama", {"model_type": "olmo2"}, "qk-norm spans all heads|spans all heads"),
        ("llama", {"model_type": "mimo_v2_flash"}, "'mimo_v2_flash' cannot be imported: its val"),
        ("llama", {"model_type": "mamba"}, "'mamba' cannot be imported: no conversion target"),
        ("llama", {"model_type": "mamba", "state_size": 16}, "imported: it has state-space layers"),
        ("llama", {"model_type": "deepseek_v2", "kv_lora_rank": 512}, "multi-head latent attent"),
        ("llama", {"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder model"),
        (
            "llama",
            {"model_type": "x", "vision_config": {"a": 1}, "attn_logit_softcapping": 50.0},
            "it also reads images; its attention scores have a soft cap. Supported: ",
        ),
        ("llama", {"attention_bias": True}, "attention_bias without mlp_bias"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' without orig"),
        ("llama", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_b"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers with 1 entries for 2 layers"),
        ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ("glm4", {"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("glm4_moe", {"num_experts_per_tok": 1, "n_group": 1}, "with topk 1 "),
        ("glm4_moe", {"num_experts_per_tok": 3}, "topk must be 2 per group"),
        ("dots1", {"n_group": None}, "no value for n_group"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "low_freq_factor 2.0",
        ),
        ("granite_swa", {"attention_multiplier": 0.5}, "attention_multiplier 0.5"),
        ("granite_swa", {"residual_multiplier": 0.22}, "residual_multiplier"),
        ("granite_swa", {"layer_rope_theta": [1e4, 0]}, "layer_rope_theta"),
        ("flint", {"layer_types": ["full_attention"] * 2}, "no RoPE"),
        ("flint", {"mlp_only_layers": [0]}, "experts"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit 6.0"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 2}, "only linear attention"),
        (
            "qwen3_5_text",
            {"layer_types": ["full_attention"] * 3},
            "3 entries for",
        ),
        (
            "qwen3_5_text",
            {"full_attention_interval": 2},
            "that contradict full_attention_interval 2",
        ),
        ("qwen3_5_text", {"layer_types": ["full_attention", "conv"]}, "layer_types: conv"),
        ("qwen3_next", {"linear_num_value_heads": 24}, "24, which is not a multiple of .* 16"),
        ("qwen3_next", {"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 and 1.0"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "sum to one"),
        ("qwen3_next", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\], which are not the first"),
        ("qwen3_next", {"mlp_only_layers": [0, 1]}, r"mlp_only_layers \[0, 1\]"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("lfm3", {"layer_types": ["conv", "full_attention"]}, "convolutions"),
        ("lfm3", {"use_sandwich_norm": True}, "use_sandwich_norm"),
        ("llama", {"hidden_act": "quick_gelu"}, "quick_gelu"),
        ("megasink", {"attention_variant": "tanh"}, "attention_variant 'tanh'"),
        ("megasink", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ("megasink", {"attention_bias_type": "rope"}, "--attention-bias-type rope"),
        ("megasink", {"rope_parameters": {"rope_type": "yarn"}}, "without factor and original"),
        ("megasink", {"rope_scaling": {"type": "linear"}} | NO_ROPE, "RoPE scaling 'linear'"),
        ("megasink", {"rope_parameters": BY_LAYER}, "RoPE parameters per layer type"),
        ("qwen3", {"rope_parameters": BY_LAYER}, "RoPE parameters per layer type"),
        ("deepseek_v3", {"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ("deepseek_v3", {"rope_scaling": YARN | {"truncate": False}}, "its latent .* the range"),
        ("own-latent", {"v_head_dim": None}, "lacks 'v_head_dim'"),
        ("own-latent", {"attention_variant": "kv-bias"}, "has no kv-bias attention"),
        ("own-latent", {"sdpa_output_norm": "rmsnorm"}, "has no --sdpa-output-norm rmsnorm"),
        ("own-latent", {"no_rope_layers": [1, 0]}, "has no --no-rope-freq"),
        ("own-latent", {"rope_parameters": YARN | {"truncate": False}}, "rounds the range"),
        ("own-latent", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, "window"),
        (
            "megasink",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 and rotary_percent",
        ),
        (
            "megasink",
            {"attention_variant": "sink", "attention_variant_layers": [True]},
            r"attention_variant_layers \[True\] \(not 2 entries",
        ),
        (
            "megasink",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 and rotary_percent 1.0",
        ),
    ],
)
def test_what_megatron_cannot_express_is_refused_by_name(target, change, said):
    known = (MODELS | OWN).items()
    target, architecture = next(m for name, m in known if target in (name, m[0]))
    config = config_of(architecture, TARGETS[target], {}) | change
    with pytest.raises(UserError, match=said):
        architecture_from(config)


@pytest.mark.parametrize("name", ["qwen3-windows", "own-sink-in-windows"])
def test_the_flags_of_an_import_need_no_quotes(name):
    """`$(cat flags.txt)` takes none off."""
    flags = model_flags((MODELS | OWN)[name][1])
    assert "--window-attn-skip-freq" in flags
    assert as_line(flags).split() == flags
    assert shlex.split(as_line([*flags, "a folder", "it's"])) == [*flags, "a folder", "it's"]


@pytest.mark.parametrize("theta", [None, 5e5])
def test_the_older_key_of_rope_goes_first_as_in_transformers(theta):
    """A config.json with both keys, with and without a base at its top level."""
    config = config_of(model(), TARGETS["llama"], {})
    default = {"rope_type": "default", "rope_theta": 1e4}
    top = {} if theta is None else {"rope_theta": theta}
    both = {**config, **top, "rope_parameters": default, "rope_scaling": YARN}
    assert architecture_from(both)[0].yarn == Yarn(factor=4.0, original=32)
    for older in ({"rope_type": "dynamic", "factor": 4.0}, {"type": "linear", "factor": 2.0}):
        both = {**config, **top, "rope_parameters": default, "rope_scaling": older}
        read = transformers.LlamaConfig.from_dict(copy.deepcopy(both)).rope_parameters
        with pytest.raises(UserError, match=f"RoPE scaling '{read['rope_type']}'"):
            architecture_from(both)
    plain = {"rope_type": "default", "rope_theta": 3e4}
    for given in (
        {"rope_parameters": default, "rope_scaling": plain},
        {"rope_parameters": default, "rope_scaling": None},
        {"rope_parameters": default, "rope_scaling": {}},
        {"rope_parameters": plain},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {}},
    ):
        both = {**config, **top, **given}
        read = transformers.LlamaConfig.from_dict(copy.deepcopy(both)).rope_parameters
        assert architecture_from(both)[0].rope_base == read["rope_theta"], given
