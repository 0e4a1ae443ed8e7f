"""`megasink analyze` and `megasink report`, from a folder to a page."""

import base64
import csv
import html
import json
import re
import shutil

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from megasink.analysis.analysis_folder import read_analysis
from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.inactive_heads import wasserstein
from megasink.analysis.pages import analysis_figures
from megasink.analysis.pages import analysis_page as pages
from megasink.cli import main
from tests.analysis.capture.tiny_models import REAL_TEXTS, save_with_tokenizer, tiny_model

TEXTS = ("lines", "prose")
NAMES = {"llama": "llama", "gpt-oss": "<script>alert(1)</script> & $x_{"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models with a tokenizer, and texts."""
    root = tmp_path_factory.mktemp("analyze")
    texts = REAL_TEXTS[:3]
    (root / "lines.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (root / "prose.txt").write_text("One text, in which nothing stands twice. One text.")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_with_tokenizer(root, "llama", texts))
    tiny_model("gpt-oss", vocab_size=len(tokenizer)).save_pretrained(root / "gpt-oss")
    tokenizer.save_pretrained(root / "gpt-oss")
    return root


@pytest.fixture(scope="module")
def analyzed(folder):
    draw = pages.figures
    for name in ("llama", "gpt-oss"):
        if name == "gpt-oss":  # its figures are drawn on the common page
            pages.figures = lambda analyses, kinds: []
        command = f"analyze {folder}/{name} --data {folder}/lines.jsonl {folder}/prose.txt"
        command += f" --output {folder}/out/{name} --seq-length 24 --max-samples 2 --batch-size 3"
        command += " --inputs natural repeated --device cpu"
        command += " --map-length 16 --maps" + (" 1.3" if name == "gpt-oss" else "")
        try:
            assert main([*command.split(), "--name", NAMES[name]]) == 0
        finally:
            pages.figures = draw
    return folder / "out"


def test_an_analysis_is_whole(analyzed, folder):
    found = json.loads((analyzed / "llama" / "results.json").read_text())
    assert found["format"] == 3
    metrics = {name: result["values"] for name, result in found["metrics"].items()}
    assert list(found["datasets"]) == ["lines", "prose", "repeated"]
    assert [d["samples"] for d in found["datasets"].values()] == [2, 1, 2]
    assert found["samples"] == 3  # texts alone
    assert found["tokens"] == 3 * 24
    of_texts = [found["datasets"][name]["metrics"]["importance"]["values"] for name in TEXTS]
    mean = np.average(of_texts, axis=0, weights=[2, 1])
    assert np.allclose(metrics["importance"], mean, atol=1e-12)
    assert found["run"]["seed"] == 1234
    assert re.fullmatch("[0-9a-f]{64}", found["run"]["data_sha256"])
    assert found["model"]["kind"] == "LlamaForCausalLM"
    assert metrics["bits_per_byte"] > 0
    assert np.asarray(metrics["importance"]).shape == (2, 4)
    with (analyzed / "llama" / "tables" / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    for row in rows:
        expected = metrics["importance"][int(row["layer"])][int(row["head"])]
        assert float(row["importance"]) == expected
        of_prose = found["datasets"]["prose"]["metrics"]["importance"]["values"]
        expected = of_prose[int(row["layer"])][int(row["head"])]
        assert float(row["importance_on_prose"]) == expected
    for table in ("layers", "states", "scores", "datasets"):
        lines = (analyzed / "llama" / "tables" / f"{table}.csv").read_text().splitlines()
        assert len(lines) == 1 + {"layers": 2, "states": 5, "scores": 16, "datasets": 3}[table]
    arrays = np.load(analyzed / "llama" / "samples.npz")
    assert arrays["metric/ahon_ln"].shape == (5, 2, 4)
    geometry = np.load(analyzed / "llama" / "geometry.npz")
    assert geometry["mlp0_tsne_N2"].shape == geometry["normed_pca_N2"].shape == (3 * 8, 2)
    assert geometry["normed_state_S"].tolist() == found["geometry"]["normed"]["states"]
    assert arrays["dataset"].tolist() == ["lines", "lines", "prose", "repeated", "repeated"]
    for name, values in read_analysis(analyzed / "llama").by_sample.items():
        assert np.array_equal(values, arrays[f"metric/{name}"][:3], equal_nan=True)
    assert arrays["source"][0] == f"{folder}/lines.jsonl:1"


def test_the_page_holds_everything_itself(analyzed):
    page = (analyzed / "llama" / "report.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    files = {p.name: p.read_bytes() for p in (analyzed / "llama" / "figures").iterdir()}
    assert {base64.b64decode(p) for p in pictures} == set(files.values())
    assert {"importance.png", "norms.png", "scores.png", "layer_maps.png"} <= set(files)
    arrays = np.load(analyzed / "llama" / "maps.npz")
    assert {f"head_{layer}.{head}.png" for layer, head in arrays["head_C2"]} <= set(files)
    assert all("highest" in why or "lowest" in why for why in arrays["why_C"])
    assert arrays["map_CTS"].shape[1:] == (16, 17)
    loaded = re.sub(r"base64,[^\"]+|<a href=\"https://arxiv.org/abs/[^\"]+\"|http-equiv", "", page)
    assert "http" not in loaded  # links are followed by a reader alone
    assert re.search(r"<h2[^>]*>Summary</h2>\n<p>llama, 3 [^<]+ have an attention sink", page)
    assert page.index("Sinks, hidden states and heads by layer") < page.index('<h2 id="sinks"')
    found = json.loads((analyzed / "llama" / "results.json").read_text())
    number = {name: result["number"] for name, result in found["metrics"].items()}
    assert f"<td>{number['imbalance']:.3f}</td>" in page
    # Texts and repeated tokens are two things, and the texts come first.
    words = re.search("<p>llama, .*?(?=<p>llama on)", page, re.S)[0]
    repeated = re.search("<p>llama on repeated tokens, [^<]*</p>", page)[0]
    of_repeated = found["datasets"]["repeated"]
    for text, of in ((words, found), (repeated, of_repeated)):
        share = of["metrics"]["sink_rate"]["number"]
        assert f"{of['samples']} sample" in text
        assert " of 24 tokens: " in text
        spread = of["spread"].get("sink_rate")
        shown = "" if spread is None else f" (± {100 * spread:.1f} over samples)"
        assert f"{100 * share:.1f}% of the heads{shown} have" in text
    assert "<code>megasink ablate</code> measures" in words
    assert "With fewer than 16 samples or 64 tokens these numbers say little" in words
    assert [bool(of["spread"]) for of in found["datasets"].values()] == [True, False, True]
    anchors = set(re.findall(r'href="#([^"]+)"', page))
    assert anchors == set(re.findall(r'<h[23] id="([^"]+)"', page))
    assert len(re.findall('<img alt="[^"]+:', page)) == len(pictures)


PLAIN = {
    "anywhere",
    "largest",
    "over",
    "others",
    "with",
    "after",
    "which",
    "first",
    "mean",
    "weight",
}
"""Words of titles that need no glossary."""
NAMES_OF_THINGS = {"IDs", "arXiv", "SHA-256", "README"}


def test_the_glossary_has_the_words_of_the_page(analyzed):
    page = (analyzed / "llama" / "report.html").read_text()
    page, _, after = page.partition('<h2 id="words-and-papers"')
    visible = html.unescape(re.sub(r"<svg.*?</svg>|<details>.*?</details>|<[^>]+>", " ", page))
    glossary = html.unescape(re.sub("<[^>]+>", " ", after.partition("arXiv")[0])).lower()
    short = set(re.findall(r"\b[A-Za-z]+-?[A-Z][A-Za-z]*\b", visible)) - NAMES_OF_THINGS
    assert {"AWFT", "IoU", "CDF", "PCA", "t-SNE", "NaN", "F-Attn"} <= short
    assert not {word for word in short if word.lower() not in glossary}
    shown = {
        word.lower().rstrip("s")
        for entry in metrics().values()
        if entry.is_summarized or entry.inactive or entry.shown & {"curve", "heatmap"}
        for word in re.findall(r"[A-Za-z-]{4,}", entry.title)
    }
    assert not {word for word in shown if word not in glossary} - {w.rstrip("s") for w in PLAIN}
    stages = metrics()["circuit_stage"].levels
    assert all(f"{stage}: " in glossary for stage in stages)


def test_alternative_texts_say_what_is_found(analyzed):
    page = (analyzed / "llama" / "report.html").read_text()
    alts = [html.unescape(alt) for alt in re.findall('<img alt="([^"]+)"', page)]
    found = json.loads((analyzed / "llama" / "results.json").read_text())["metrics"]
    importance = np.array(found["importance"]["values"], dtype=float)
    layer, head = np.unravel_index(np.nanargmax(importance), importance.shape)
    (told,) = (alt for alt in alts if alt.startswith("Head importance"))
    assert f"to {importance.max():.4g} (layer {layer}, head {head})" in told
    rate = found["sink_rate"]["number"]
    assert f"{100 * rate:.1f}% of the heads" in alts[0]
    assert all(re.search(r"[:.] .*\d", alt) for alt in alts)


def test_sinks_stand_beside_even_heads(analyzed):
    page = (analyzed / "llama" / "report.html").read_text()
    with np.load(analyzed / "llama" / "samples.npz") as arrays:
        lengths = arrays["tokens"][arrays["dataset"] != "repeated"]
    even = np.mean([sum(1 / i for i in range(1, t + 1)) / t for t in lengths])
    summary = page.partition('<h2 id="by-dataset"')[0]
    for row in ("sink rate, eps 0.3", "heads over drain", "weight on the first token, mean"):
        (cell,) = re.findall(f'<th scope="row">{row}.*?</th>', summary, re.S)
        assert f"A head that attends evenly gives this key a weight of {even:.4f}." in cell


def test_two_models_on_one_page(analyzed, tmp_path, capsys, monkeypatch):
    some = [
        d for d in analysis_figures.drawings() if d.name in ("importance", "layer_maps", "head")
    ]
    monkeypatch.setattr(analysis_figures, "drawings", lambda: some)
    folders = f"{analyzed}/llama {analyzed}/gpt-oss"
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "head_9.9.png").write_bytes(b"of an earlier report")
    assert main(f"report {folders} --output {tmp_path} --pdf --overwrite".split()) == 0
    names = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert "head_9.9" not in names
    assert names == {path.stem for path in (tmp_path / "figures").glob("*.pdf")}
    page = (tmp_path / "report.html").read_text()
    arrays = [
        np.load(analyzed / name / "samples.npz")["metric/awft"][:3]  # of the texts
        for name in ("llama", "gpt-oss")
    ]
    assert f"<td>{wasserstein(*arrays):.4f}</td>" in page
    assert not (tmp_path / "tables").exists()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x_{" in page
    assert (tmp_path / "figures" / "layer_maps_2.png").is_file()
    assert (tmp_path / "figures" / "head_1.3_2.png").is_file()
    assert main(f"report {tmp_path} --output {tmp_path}".split()) == 2
    assert "is not an analysis" in capsys.readouterr().err


def test_analyses_that_do_not_compare_say_so(analyzed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])
    shutil.copytree(analyzed / "llama", tmp_path / "longer")
    path = tmp_path / "longer" / "results.json"
    found = json.loads(path.read_text())
    found["run"] |= {"seq_length": 48, "data": ["other.txt"], "data_sha256": "0"}
    path.write_text(json.dumps(found))
    command = f"report {analyzed}/llama {tmp_path}/longer --output {tmp_path}/out"
    assert main(command.split()) == 0
    said = capsys.readouterr().err
    page = (tmp_path / "out" / "report.html").read_text()
    for words in ("different sequence lengths (--seq-length)", "different texts (--data)"):
        assert f"megasink: warning: the analyses have {words}" in said
        assert words in page
    assert 'class="warning"' in page
    # The same samples, and other tokenizers alone, are nothing to say.
    assert main(f"report {analyzed}/llama {analyzed}/gpt-oss --output {tmp_path}/two".split()) == 0
    assert "warning" not in capsys.readouterr().err


def test_two_analyses_of_one_name_are_told_apart(analyzed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])
    shutil.copytree(analyzed / "llama", tmp_path / "other")
    path = tmp_path / "other" / "results.json"
    found = json.loads(path.read_text())
    found["metrics"]["imbalance"]["number"] = 7.125
    path.write_text(json.dumps(found))
    command = f"report {analyzed}/llama {tmp_path}/other --output {tmp_path}/out"
    assert main(command.split()) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    head = "<th>llama (llama)</th><th>llama (other)</th><th>change</th>"
    assert head in re.sub(r"</?tr>|\n| scope=\"col\"", "", page)
    before = json.loads((analyzed / "llama" / "results.json").read_text())["metrics"]["imbalance"]
    assert f"<td>7.125</td><td>+{7.125 - before['number']:.3f}</td>" in page.replace("\n", "")
    words = re.sub("<[^>]+>", "", page)
    told = "head importance (1 - attention to the first token) changes by at most 0.000 (layer"
    assert f"From llama (llama) to llama (other) {told}" in words
    assert "and a head's attention" not in words  # the same number
    assert "llama (other): prose" in page
    capsys.readouterr()
    twice = f"report {analyzed}/llama {analyzed}/llama --output {tmp_path}/twice"
    assert main(twice.split()) == 2
    assert "an analysis is given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["inactive_heads"]["thresholds"].update(mine={"0.15": 1.0}), "score 'mine'"),
        (lambda r: r["inactive_heads"]["agreement"]["scores"].append("mine"), "score 'mine'"),
        (
            lambda r: r["inactive_heads"]["thresholds"]["awft"].clear(),
            "no threshold for share 0.15",
        ),
        (
            lambda r: r["inactive_heads"]["share_by_layer"]["awft"].pop(),
            "awft does not have one value for each",
        ),
        (lambda r: r["metrics"]["sink_rate"].update(values=[None]), "sink_rate.values has no"),
        (
            lambda r: r["metrics"]["importance"].update(values=[[1, 2], [3]]),
            "not a table of numbers",
        ),
        (lambda r: r["metrics"]["importance"].update(values=[[None]]), "has shape (1, 1), which"),
        (
            lambda r: r["datasets"]["prose"]["metrics"]["awft"].update(values="x"),
            "datasets.prose.metrics.awft.values is not a table of numbers",
        ),
        (lambda r: r["model"]["heads"].pop(), "model.heads has 1 entries for 2 layers"),
        (lambda r: r["metrics"].pop("imbalance"), "has no imbalance"),
    ],
)
def test_what_no_analysis_writes_is_refused(analyzed, tmp_path, capsys, monkeypatch, change, said):
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])
    shutil.copytree(analyzed / "llama", tmp_path / "damaged")
    path = tmp_path / "damaged" / "results.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    assert main(f"report {tmp_path}/damaged --output {tmp_path}/out".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "out").exists()


def test_maps_of_an_earlier_analysis_do_not_stay(analyzed, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])
    (tmp_path / "maps.npz").write_bytes(b"old")
    command = f"analyze {folder}/llama --data {folder}/prose.txt --output {tmp_path} --no-loss"
    assert main([*command.split(), "--seq-length", "24", "--device", "cpu", "--overwrite"]) == 0
    assert not (tmp_path / "maps.npz").exists()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--maps --map-length 999", "--map-length 999: use 2 to 255"),
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
