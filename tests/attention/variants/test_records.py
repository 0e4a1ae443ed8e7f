"""The registry, and that nothing but a variant's record decides by its name."""

import ast
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megasink.attention.variants import (
    Parameter,
    Variant,
    of_kind,
    register,
    variant,
    variant_registry,
    variants,
)
from megasink.errors import UserError
from megasink.options import run_options
from megasink.training.checks import variants as checks
from tests.documented import register_variant

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megasink"
# Its own call, which records are mapped to; and files that are copied beside weights.
APART = ("attention", "transformers/modeling")
NAMES = {record.name for record in variants()}


def compared_names(source: str) -> list[str]:
    """Names of variants that a file compares with, matches, or looks things up by."""
    found = []
    for node in ast.walk(ast.parse(source)):
        deciding: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            deciding = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            deciding = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.MatchValue):
            deciding = [node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
            *("startswith", "endswith", "get", "removesuffix"),
        ):
            deciding = [*node.args[:1]]
        for part in deciding:
            values = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]
            found += [
                f"{value.lineno}: {value.value}"
                for value in values
                if isinstance(value, ast.Constant) and value.value in {*NAMES, "-bias"}
            ]
    return found


def test_nothing_else_compares_names():
    files = list(PACKAGE.rglob("*.py"))
    apart = {p for room in APART for p in (PACKAGE / room).rglob("*.py")}
    assert len(files) - len(apart) > 150
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in files
        if path not in apart and (names := compared_names(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        'x = a == "sink"',
        'x = a in ("vanilla", "gated")',
        'x = {"k-bias": 1}[a]',
        'x = a.endswith("-bias")',
        'x = {}.get("off-by-one")',
        'match a:\n    case "kv-bias":\n        pass',
    ],
)
def test_a_planted_comparison_is_found(line):
    assert compared_names(line)


def test_a_module_adds_a_variant_to_the_flag_and_its_help():
    with mock.patch.dict(variant_registry._VARIANTS):
        register_variant()
        parser = ArgumentParser()
        run_options.add_options(parser)
        assert parser.parse_args(["--attention-variant", "sink-per-group"])
        (action,) = (a for a in parser._actions if a.dest == "attention_variant")
        assert action.metavar.endswith("v-bias,sink-per-group}")
        assert "sink-per-group: one learnable sink logit per key/value group" in action.help
        assert of_kind("sink-per-group") is variant("sink-per-group")
        with pytest.raises(UserError, match="'sink-per-group' is registered twice"):
            register_variant()


def test_a_name_that_no_record_has():
    with pytest.raises(UserError, match=r"'k-bais' is unknown: .*did you mean k-bias"):
        variant("k-bais")
    with pytest.raises(UserError, match="'headwide' is unknown"):
        of_kind("headwide")
    plain = variant("vanilla")
    with pytest.raises(UserError, match="'Sink Per Group': use only lower-case"):
        register(replace(plain, name="Sink Per Group"))
    with pytest.raises(ValueError, match="'half': define either attend"):
        replace(plain, name="half", slot_value=None)


def test_a_command_line_is_refused_what_a_record_does_not_say():
    args = SimpleNamespace(
        attention_variant="mystery",
        sdpa_output_norm="rmsnorm",
        tensor_model_parallel_size=2,
        num_attention_heads=4,
        num_query_groups=1,
        group_query_attention=True,
        hidden_size=64,
        kv_channels=None,
        **{option: checks._DEFAULTS[option] for r in variants() for option in r.options},
    )
    args.gate_position = "value"
    with mock.patch.dict(variant_registry._VARIANTS):
        register_variant()
        outside = variant("sink-per-group")
        register(
            Variant(
                name="mystery",
                description="-",
                attend=variant("v-bias").attend,
                parameters=outside.parameters,
            )
        )
        record = variant("mystery")
        found = list(checks.of_record(args, record))
    loss = {"--head-balance-coeff": 1e-4}
    assert "'mystery' needs slot_value" in str(checks.without_gradient(loss, record, "softmax"))
    assert [text.partition(": ")[0] for text in found] == [
        "--attention-variant mystery does not support --gate-position",
        "--tensor-model-parallel-size 2 with --attention-variant mystery",
        "--sdpa-output-norm rmsnorm cancels the gate of --attention-variant mystery",
    ]
    assert "the 1 rows of group_sink are not divisible by 2 tensor-parallel ranks" in found[1]


@pytest.mark.parametrize("page", ["README.md", "docs/options.md"])
def test_the_pages_list_the_variants(page):
    names = ", ".join(f"`{record.name}`" for record in variants())
    assert f"| `--attention-variant` | `sink` | {names} |" in (ROOT / page).read_text()


def test_a_parameter_starts_at_zero_unless_a_record_says_otherwise():
    """Plugins rely on it; each parameter of the package sets its own value or draws it."""
    assert Parameter(name="extra", shape=lambda config: (2,)).initial(None) == 0.0
