"""The examples of docs/interventions.md run as they are written."""

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/interventions.md"


def test_the_examples_run(capsys):
    examples = DOCUMENT.read_text().split("```python\n")[1:]
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example.split("```")[0], str(DOCUMENT), "exec"), names)
    told = capsys.readouterr().out
    assert "% of the heads, threshold 0." in told
    assert told.count("[") == 4  # a matrix of two layers, and a shape
    assert "torch.Size([2, 16, 32])" in told
