"""The options of an analysis: one frozen record, whoever asks."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from megasink.analysis.api import analyze
from megasink.analysis.options import AnalysisOptions
from megasink.cli.analyze import analyze_parser


def test_a_command_line_and_a_program_ask_for_the_same_by_default(tmp_path):
    args = analyze_parser("analyze").parse_args(
        ["model", "--data", "texts", "--output", str(tmp_path)]
    )
    options = AnalysisOptions.of(args)
    assert options == AnalysisOptions(data=("texts",), output=tmp_path)
    by_name = {field.name: field.default for field in fields(AnalysisOptions)}
    shared = by_name.keys() & inspect.signature(analyze).parameters.keys()
    assert {"seq_length", "max_samples", "batch_size", "bos", "loss", "seed"} < shared
    for name in shared:
        assert inspect.signature(analyze).parameters[name].default == by_name[name], name
    with pytest.raises(FrozenInstanceError):
        options.seq_length = 3
