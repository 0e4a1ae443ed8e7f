"""The example of docs/interventions.md runs as it is written."""

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/interventions.md"


def test_the_example_runs(capsys):
    example = DOCUMENT.read_text().split("```python\n")[1]
    exec(compile(example.split("```")[0], str(DOCUMENT), "exec"), {})
    told = capsys.readouterr().out
    assert "% of the heads, threshold 0." in told
    assert told.count("[") == 3  # a matrix of two layers
