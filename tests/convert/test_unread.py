"""Every entry of a config.json is read, harmless, or refused by name; names of targets."""

import copy
import dataclasses

import pytest
import transformers
from packaging.version import Version

from megasink.convert.hf_config import architecture_from, config_of
from megasink.convert.targets import TARGETS
from megasink.convert.unread_config_entries import _is_harmless
from megasink.errors import UserError
from tests.convert import collection
from tests.convert.collection import IMPORTED
from tests.convert.models import MODELS, OWN
from tests.convert.published import RELEASED
from tests.convert.tiny import model as tiny

# {type: entries without an effect in these configurations}
NO_EFFECT = {
    "qwen2": "use_sliding_window sliding_window max_window_layers",
    "qwen3": "use_sliding_window sliding_window max_window_layers",
    "qwen3_moe": "intermediate_size sliding_window",
    "qwen3_next": "intermediate_size",
    "deepseek_v3": "num_key_value_heads head_dim",
    "gpt_oss": "hidden_act",
    "glm4_moe": "topk_group",
    "dots1": "topk_group sliding_window max_window_layers",
    "phi3": "original_max_position_embeddings",
    "smollm3": "use_sliding_window sliding_window no_rope_layer_interval",
}
# Fields that the shapes of the weights contradict where they are wrong.
SHAPES = ("groups", "head_dim", "ffn")
FEW = ("Mixtral-8x7B", "gpt-oss-20b", "cwm", "Qwen3-4B-Instruct-2507", "granite-3.3-2b-base")


def _other(value):
    """A value of the same type that differs."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, list):
        return ["other"] * len(value) or [1]
    return "other" if isinstance(value, str) else 3


@pytest.mark.parametrize("name", IMPORTED)
def test_an_altered_entry_gives_another_model_or_a_refusal(name):
    kind, keys = IMPORTED[name]
    config = collection.config_of(kind, keys)
    model, _ = architecture_from(config)
    silent = []
    for key, value in config.items():
        if _is_harmless(key, 1) or isinstance(value, dict):
            continue
        try:
            altered, _ = architecture_from({**config, key: _other(value)})
        except UserError:
            pass
        else:
            silent += [key] if altered == model else []
    assert sorted(silent) == sorted(NO_EFFECT.get(kind, "").split())


def _later(names):
    for name in names:
        yield pytest.param(name, marks=[] if name in FEW else [pytest.mark.later])


@pytest.mark.parametrize("name", _later([*IMPORTED, *RELEASED]))
def test_a_missing_entry_means_what_it_means_to_transformers(name):
    if name in IMPORTED:
        kind, keys = IMPORTED[name]
        config = collection.config_of(kind, keys)
    else:
        config = RELEASED[name][0]
    for key in config.keys() - {"model_type"}:
        gone = {key, "rope_theta", "rope_scaling"} if key == "rope_parameters" else {key}
        without = {k: copy.deepcopy(v) for k, v in config.items() if k not in gone}
        try:
            found, _ = architecture_from(without)
        except UserError:
            continue
        read = transformers.AutoConfig.for_model(**copy.deepcopy(without)).to_dict()
        read |= {"dtype": read["dtype"] or "float32"}
        expected, _ = architecture_from(read)
        shapes = {field: getattr(expected, field) for field in SHAPES}
        assert dataclasses.replace(found, **shapes) == expected, key


UNKNOWN = {
    "attention_multiplier": 0.5,
    "logit_scale": 0.0625,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "clip_qkv": 8.0,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "use_something_new": True,
    "per_layer_config": {"0": {"sliding_window": 8}},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "layer_types": ["chunked_attention", "full_attention"],
    "compression_config": {"quant_method": "int8"},
    "mup_base_width": 256,
    "no_rope_layers": [1, 0],
}


@pytest.mark.parametrize("target", ["llama", "qwen3", "glm4", "mixtral"])
def test_an_unknown_entry_is_refused_by_name_with_its_value(target):
    config = _written(target)
    architecture_from(config | dict.fromkeys(UNKNOWN) | {"use_something_new": False})
    for key, value in UNKNOWN.items():
        with pytest.raises(UserError, match=key) as caught:
            architecture_from({**config, key: value})
        assert str(value[0] if isinstance(value, list) else value) in str(caught.value)
        assert "\n" not in str(caught.value)


def _written(target):
    return config_of(next(m for name, m in MODELS.values() if name == target), TARGETS[target], {})


def test_entries_of_released_files_that_change_nothing_are_accepted():
    given = {"pretraining_tp": 2, "is_llama_config": True, "rope_interleaved": False}
    given |= {"transformers.js_config": {"dtype": "q4"}, "unsloth_version": "2025.3.1"}
    given |= {"compression_ratio": 1.0, "use_mrope": False, "label2id": {"a": 0}, "top_k": 5}
    given |= {"hidden_dropout_prob": 0.1, "summary_loss_coef": 0.5, "_a_remark": {"x": [1]}}
    plain = _written("llama")
    assert architecture_from(plain | given) == architecture_from(plain)


@pytest.mark.parametrize(
    ("target", "change"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("dots1", {"moe_layer_freq": 2}),
        ("deepseek_v3", {"num_local_experts": 8}),
        ("qwen3_5_text", {"attn_output_gate": False}),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}),
        ("megasink", {"use_something_new": True}),
    ],
)
def test_options_of_one_family_are_refused_by_name(target, change):
    model = next(m for name, m in (MODELS | OWN).values() if name == target)
    ((key, value),) = change.items()
    said = rf"{key}.*{value if isinstance(value, str) else ''}"
    with pytest.raises(UserError, match=said):
        architecture_from(config_of(model, TARGETS[target], {}) | change)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_file_is_accepted(name):
    config, _ = RELEASED[name]
    architecture_from(config | {"torch_dtype": "bfloat16", "transformers_version": "4.40.0"})


def test_two_numbers_of_experts_are_refused():
    config = config_of(tiny(experts=4, topk=2), TARGETS["qwen3_moe"], {})
    assert architecture_from(config | {"num_local_experts": 4})[0].experts == 4
    with pytest.raises(UserError, match="num_experts 4 and num_local_experts 8"):
        architecture_from(config | {"num_local_experts": 8})


def test_the_names_of_targets_are_those_of_transformers():
    # Without importing models: the registry of configurations alone.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for target in (t for t in TARGETS.values() if not t.custom_code):
        if Version(transformers.__version__) < Version(target.since):
            continue
        assert target.name in CONFIG_MAPPING_NAMES
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[target.name] == target.architecture
