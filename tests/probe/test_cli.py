"""`megasink analyze` and `megasink report`, from a folder to a page."""

import base64
import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from megasink.cli import main
from megasink.data.corpus import Corpus
from megasink.data.tokenizer import train_tokenizer
from megasink.diagnostics.distances import wasserstein
from megasink.errors import ConfigError, UserError
from megasink.probe import inputs, write
from megasink.probe.options import check, parser
from tests.probe.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models with a tokenizer, and texts."""
    root = tmp_path_factory.mktemp("analyze")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    texts = readme.split("\n## ")[:3]
    (root / "lines.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (root / "prose.txt").write_text("One text, in which nothing stands twice. " * 6)
    train_tokenizer(list(Corpus([root / "lines.jsonl"])), 400, root / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(root / "tokenizer")
    for name in ("llama", "gpt-oss"):
        tiny_model(name, vocab_size=len(tokenizer)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def analyzed(folder):
    draw = write.figures
    for name in ("llama", "gpt-oss"):
        if name == "gpt-oss":  # its figures are drawn on the common page
            write.figures = lambda analyses: {}
        command = f"analyze {folder}/{name} --data {folder}/lines.jsonl {folder}/prose.txt"
        command += f" --output {folder}/out/{name} --seq-length 24 --max-samples 2 --batch-size 3"
        command += " --inputs natural repeated --device cpu"
        try:
            assert main(command.split()) == 0
        finally:
            write.figures = draw
    return folder / "out"


def test_an_analysis_is_whole(analyzed, folder):
    found = json.loads((analyzed / "llama" / "results.json").read_text())
    assert found["format"] == 2
    assert list(found["datasets"]) == ["lines", "prose", "repeated"]
    assert [d["samples"] for d in found["datasets"].values()] == [2, 1, 2]
    assert found["samples"] == 5
    assert found["tokens"] == 5 * 24
    assert found["run"]["seed"] == 1234
    assert re.fullmatch("[0-9a-f]{64}", found["run"]["data_sha256"])
    assert found["model"]["kind"] == "LlamaForCausalLM"
    assert found["bits_per_byte"] > 0
    assert np.asarray(found["importance"]).shape == (2, 4)
    with (analyzed / "llama" / "tables" / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    for row in rows:
        expected = found["importance"][int(row["layer"])][int(row["head"])]
        assert float(row["importance"]) == expected
        expected = found["datasets"]["prose"]["importance"][int(row["layer"])][int(row["head"])]
        assert float(row["importance_on_prose"]) == expected
    for table in ("layers", "states", "scores", "datasets"):
        lines = (analyzed / "llama" / "tables" / f"{table}.csv").read_text().splitlines()
        assert len(lines) == 1 + {"layers": 2, "states": 5, "scores": 16, "datasets": 3}[table]
    arrays = np.load(analyzed / "llama" / "samples.npz")
    assert arrays["score/ahon_ln"].shape == (5, 2, 4)
    geometry = np.load(analyzed / "llama" / "geometry.npz")
    assert geometry["mlp0_tsne_N2"].shape == geometry["normed_pca_N2"].shape == (5 * 8, 2)
    assert geometry["normed_state_S"].tolist() == found["geometry"]["normed"]["states"]
    assert found["geometry"]["mlp0"]["perplexity"] == 13.0
    assert arrays["source"][0] == f"{folder}/lines.jsonl:1"


def test_the_page_holds_everything_itself(analyzed):
    page = (analyzed / "llama" / "report.html").read_text()
    pictures = re.findall(r"src='data:image/png;base64,([^']+)'", page)
    files = {p.read_bytes() for p in (analyzed / "llama" / "figures").glob("*.png")}
    assert {base64.b64decode(p) for p in pictures} == files
    assert len(files) == 7
    assert "http" not in re.sub(r"base64,[^']+", "", page)
    found = json.loads((analyzed / "llama" / "results.json").read_text())
    assert f"<td>{found['imbalance']:.3f}</td>" in page
    assert f"{100 * found['sink_rate']['0.3'][0]:.1f} % of the heads" in page


def test_two_models_on_one_page(analyzed, tmp_path, capsys):
    folders = f"{analyzed}/llama {analyzed}/gpt-oss"
    assert main(f"report {folders} --output {tmp_path}".split()) == 0
    page = (tmp_path / "report.html").read_text()
    arrays = [
        np.load(analyzed / name / "samples.npz")["score/awft"] for name in ("llama", "gpt-oss")
    ]
    assert f"<td>{wasserstein(*arrays):.4f}</td>" in page
    assert not (tmp_path / "tables").exists()
    assert main(f"report {tmp_path} --output {tmp_path}".split()) == 2
    assert "holds no analysis" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--data {0}/nothing", "nothing"),
        ("--bos add", "has no BOS token; use auto"),
        ("--attn-implementation sdpa", "scaled_dot_product_attention"),
    ],
)
def test_bad_input_is_named(folder, tmp_path, capsys, flags, problem):
    name = "gpt-oss" if "sdpa" in flags else "llama"  # sdpa would drop its sinks
    command = f"analyze {folder}/{name} --data {folder}/prose.txt --output {tmp_path} "
    command += "--seq-length 24 --device cpu " + flags.format(folder)
    assert main(command.split()) == 2
    assert problem in capsys.readouterr().err


def test_problems_of_the_command_line_come_together(tmp_path):
    args = parser().parse_args(
        f"{tmp_path} --output {tmp_path} --seq-length 1 --batch-size 0 --tokenizer none".split()
    )
    with pytest.raises(ConfigError) as error:
        check(args)
    for part in ("no config.json", "no --data", "--seq-length 1", "--batch-size 0", "--tokenizer"):
        assert sum(part in problem for problem in error.value.problems) == 1


class Doubled:
    """A tokenizer that puts BOS twice."""

    bos_token_id, name_or_path = 7, "doubled"

    def encode(self, text, add_special_tokens=True):
        return ([7, 7] if add_special_tokens else []) + [10 + len(w) for w in text.split()]


def test_bos_is_added_once():
    with pytest.raises(UserError, match="BOS token 7 before a text twice"):
        inputs.encode(Doubled(), "a text", "auto")
    assert inputs.encode(Doubled(), "a text", "none") == [11, 14]
    once = Doubled()
    once.encode = lambda text, add_special_tokens=True: [11, 14]
    assert inputs.encode(once, "a text", "auto") == [11, 14]
    assert inputs.encode(once, "a text", "add") == [7, 11, 14]
    assert inputs.dataset_names(["a/x.txt", "b/y.txt", "c/x.txt"]) == ["a/x.txt", "y", "c/x.txt"]
