"""The notebooks were run from top to bottom, and run again with a model of few steps."""

import json
import sys
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What takes most of the time: code -> in its place.
SHORTER = {
    "TriggerLanguage(chain=3), 200": "TriggerLanguage(chain=3), 40",
    "seed=7)": "seed=7)[:8]",
}


def cells(path, kind="code"):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """The folder of a notebook's run, with a model that learned for 40 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        folder = tmp_path_factory.mktemp("notebooks")
        patch.chdir(folder)
        import letters

        letters.train(Path("letters-model"), steps=40)
        yield folder
        del sys.modules["letters"]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_run_from_top_to_bottom(path):
    counts = [cell["execution_count"] for cell in cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {
        *("stream", "execute_result", "display_data")
    }
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, letters, capsys):
    import matplotlib as mpl

    mpl.use("Agg")
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*non-interactive")
        for number, cell in enumerate(cells(path), 1):
            source = "".join(cell["source"])
            for long, short in SHORTER.items():
                source = source.replace(long, short)
            exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
    if "runs" in names:
        ends = {name: imbalance[-1] for name, (_, _, _, imbalance) in names["runs"].items()}
        assert ends["with it"] < ends["without the loss"]
    else:
        assert names["found"].importance.values.shape == (2, 8)
    assert capsys.readouterr().out
