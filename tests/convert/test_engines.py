"""What other engines read of an export: keys that they require, and what is refused or named."""

import re
from pathlib import Path

import pytest

from megasink.convert.hf_config import OURS, architecture_from, config_of
from megasink.convert.targets import TARGETS, choose
from megasink.convert.targets.target import ENGINES
from megasink.errors import UserError
from tests.convert.models import MODELS
from tests.convert.tiny import MOE, model

GPT_OSS = {"attention": "sink", "activation": "gpt-oss", "layers": 4} | MOE


@pytest.mark.parametrize(
    ("windows", "written"),
    [((5, None, 5, None), 5), ((None,) * 4, 96), ((5,) * 4, None), ((None, 5) * 2, None)],
)
def test_gpt_oss_has_windows_where_every_engine_looks_for_them(windows, written):
    gpt_oss, architecture = TARGETS["gpt_oss"], model(**GPT_OSS, windows=windows)
    if written is None:
        with pytest.raises(UserError, match=r"vLLM and llama\.cpp assume windows"):
            choose(architecture, "gpt_oss")
        assert choose(architecture)[0].name == "megasink"
        return
    assert choose(architecture)[0] is gpt_oss
    config = config_of(architecture, gpt_oss, {})
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert config["sliding_window"] == written


def test_a_gpt_oss_of_transformers_comes_in_with_any_windows():
    config = config_of(model(**GPT_OSS, windows=(None,) * 4), TARGETS["gpt_oss"], {})
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    read, _ = architecture_from(config | {"layer_types": types, "sliding_window": 7})
    assert read.windows == (None, 7, 7, None)


@pytest.mark.parametrize("bias", [False, True])
def test_gpt_oss_has_the_rope_and_biases_that_engines_require(bias):
    """vLLM and transformers 4 read YaRN's keys in any case, and vLLM and llama.cpp all biases."""
    architecture = model(**GPT_OSS, windows=(None,) * 4, bias=bias, qkv_bias=bias)
    gpt_oss = TARGETS["gpt_oss"]
    config = config_of(architecture, gpt_oss, {})
    rope = config["rope_scaling"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 1.0)
    assert rope["original_max_position_embeddings"] == config["max_position_embeddings"]
    assert config["rope_parameters"] == rope | {"rope_theta": 10000.0}
    assert config["attention_bias"]
    stored = {n: row for row in gpt_oss.table(architecture) for n in row.hf if n.endswith("bias")}
    attention = {f"model.layers.{{layer}}.self_attn.{x}_proj.bias" for x in "qkvo"}
    assert stored.keys() >= attention
    assert len(stored) == 7
    assert all(bool(row.megatron) == bias for row in stored.values())
    if not bias:
        assert not any(t.any() for row in stored.values() for t in row.transform.to_hf())
    # Without what only we read, the zeros are biases like others.
    del config[OURS]
    assert architecture_from(config)[0].bias


@pytest.mark.parametrize(
    "change",
    [{"factor": 2.0}, {"original_max_position_embeddings": 48}, {"mscale": 0.7}],
)
def test_yarn_that_says_something_is_kept(change):
    config = config_of(model(**GPT_OSS, windows=(None,) * 4), TARGETS["gpt_oss"], {})
    for key in ("rope_parameters", "rope_scaling"):
        config[key] = config[key] | change
    architecture, _ = architecture_from(config)
    assert config_of(architecture, TARGETS["gpt_oss"], {})["rope_scaling"] == {
        key: value for key, value in config["rope_scaling"].items() if key != "mscale"
    }  # transformers ignores one without mscale_all_dim
    for key in ("rope_parameters", "rope_scaling"):
        config[key] = config[key] | {"attention_factor": 1.5, "factor": 1.0}
    with pytest.raises(UserError, match=r"attention_factor 1\.5 with a RoPE factor"):
        architecture_from(config)


def test_transformers_before_5_finds_the_scaling_of_rope():
    target, architecture = MODELS["llama3"]
    config = config_of(architecture, TARGETS[target], {})
    assert config["rope_scaling"] == config["rope_parameters"]
    assert "rope_scaling" not in config_of(model(), TARGETS["llama"], {})


@pytest.mark.parametrize(
    ("windows", "first"), [((None, None), 2), ((5, None), 0), ((None, 5), 1), ((5, 5), 0)]
)
def test_vllm_refuses_a_mixture_of_windows_that_it_would_ignore(windows, first):
    """Its assertion: with different layer_types, max_window_layers is the number of layers."""
    config = config_of(model(qk_norm=True, windows=windows), TARGETS["qwen3"], {})
    assert config["max_window_layers"] == first


@pytest.mark.parametrize(
    ("target", "change", "lines"),
    [
        ("llama", {}, []),
        ("llama", {"bias": True, "qkv_bias": True}, ["SGLang 0.5.23 ignores .*biases of the FFN"]),
        ("llama", {"activation": "gelu"}, ["llama.cpp ignores this model's activation: use"]),
        ("mistral", {"windows": (5, 5)}, ["SGLang.*sliding windows", "llama.cpp.*sliding windows"]),
        ("qwen3", {"qk_norm": True, "rope_factor": 8.0}, ["llama.cpp.*RoPE scaling"]),
        ("qwen2", {"qkv_bias": True, "head_dim": 8}, []),
        ("qwen2", {"qkv_bias": True}, ["vLLM 0.33 ignores this model's head_dim"]),
        ("gpt_oss", {**GPT_OSS, "windows": (None,) * 4, "norm_eps": 1e-6}, ["vLLM.*epsilon"]),
        ("lfm3", {"attention": "headwise", "qk_norm": True}, []),
        ("qwen3_next", {"layers": 4, "linear_layers": (True, False, True, False)}, []),
        ("qwen3_next", {"layers": 3, "linear_layers": (True, False, True)}, []),
        ("qwen3_next", {"linear_layers": (False, True)}, ["llama.cpp.* pattern of layers"]),
    ],
)
def test_an_engine_that_reads_another_model_is_named(target, change, lines):
    found = TARGETS[target].misread(model(**change))
    assert len(found) == len(lines)
    for line, words in zip(found, lines, strict=True):
        assert re.search(words, line), line


def test_the_page_has_what_the_records_say():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = page.partition("| target | " + " | ".join(ENGINES))[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    tried = {name for name, target in TARGETS.items() if target.engines}
    assert tried <= {row[0].strip("`") for row in rows} <= set(TARGETS)
    for name, *cells in rows:
        record = TARGETS[name.strip("`")].engines or (None,) * len(ENGINES)
        for cell, ignored in zip(cells, record, strict=True):
            assert cell.startswith("no") == (ignored is None), (name, cell)
            said = cell.partition("ignores ")[2].partition(";")[0].replace(",", "").split()
            assert said == (ignored or "").split(), (name, cell)
