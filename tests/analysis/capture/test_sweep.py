"""`megasink sweep`: every row against the model run by hand on the same tokens.

Shapes: T tokens, L layers, H heads.
"""

import csv
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.pages import sweep_page
from megasink.analysis.result_schemas import MetricResult
from megasink.cli import main
from megasink.data.corpus import Corpus
from megasink.data.hf_tokenizer import train_tokenizer
from megasink.errors import UserError
from tests.analysis.capture.tiny_models import tiny_model
from tests.distributed.layout import Layout

LENGTHS, COPIES = (8, 14), (1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokenizer has BOS, and three texts of which one is short."""
    root = tmp_path_factory.mktemp("sweep")
    texts = [
        "Sweeps ask the same question of a model again and again, at length after length.",
        "Too short.",
        "What a head attends to depends on what stands first, and on how often it stands there.",
    ]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    train_tokenizer(list(Corpus([root / "texts.jsonl"])), 330, root / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(root / "tokenizer")
    tokenizer.bos_token = tokenizer.eos_token
    tiny_model("llama", "eager", vocab_size=len(tokenizer)).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return root


def command(folder, output):
    flags = f"sweep {folder}/model --data {folder}/texts.jsonl --output {output} --device cpu"
    return f"{flags} --lengths 8 14 --bos add none --first-token-copies 1 3 --batch-size 1"


@pytest.fixture(scope="module")
def swept(folder):
    assert main(command(folder, folder / "out").split()) == 0
    return folder / "out"


@pytest.fixture
def undrawn(swept, monkeypatch):
    """The figures are drawn once, by `swept`."""
    monkeypatch.setattr(sweep_page, "pictures", lambda *_: [])


@pytest.fixture(scope="module")
def by_hand(folder):
    """(length, bos, copies) -> by text (weights [L, H, T, T], outputs' norms [L, H], nats)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    heads = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    found = {}
    for length in LENGTHS:
        for bos in ("add", "none"):
            for copies in COPIES:
                rows = []
                for text in (texts[0], texts[2]):
                    content = tokenizer.encode(text, add_special_tokens=False)[:length]
                    before = [tokenizer.bos_token_id] * copies
                    if bos == "none":
                        before = [content[0]] * (copies - 1)
                    heads.clear()
                    with torch.no_grad():
                        told = model(
                            torch.tensor([before + content]),
                            use_cache=False,
                            output_attentions=True,
                        )
                    norms = [h[0].double().unflatten(-1, (4, -1)).norm(dim=-1) for h in heads]
                    logs = told.logits[0].double().log_softmax(-1)
                    targets = range(len(before) + 1, len(before) + length)
                    nats = [-float(logs[t - 1, content[t - len(before)]]) for t in targets]
                    weights = torch.cat(told.attentions).double()
                    rows.append((weights, torch.stack([n.mean(0) for n in norms]), nats))
                found[length, bos, copies] = rows
    return found


def rows_of(swept):
    found = json.loads((swept / "sweep.json").read_text())
    return found, {(r["length"], r["bos"], r["copies"]): r for r in found["rows"]}


def test_the_loss_is_on_the_same_tokens(swept, by_hand):
    _, rows = rows_of(swept)
    assert list(rows) == list(by_hand)
    for setting, expected in by_hand.items():
        nats = np.mean([x for _, _, nats in expected for x in nats])
        assert rows[setting]["metrics"]["nats_per_token"]["number"] == pytest.approx(nats, rel=1e-5)
        assert rows[setting]["metrics"]["perplexity"]["number"] == pytest.approx(
            math.exp(nats), rel=1e-4
        )
        assert rows[setting]["samples"] == 2
        length, bos, copies = setting
        assert rows[setting]["tokens"] == length + copies - (bos == "none")
        assert all(len(nats) == length - 1 for _, _, nats in expected)


def test_inactive_heads_by_thresholds_that_stay(swept, by_hand):
    found, rows = rows_of(swept)
    assert found["set_by"] == "14-add-x1"
    arrays = np.load(swept / "sweep.npz")
    shares = set()
    for setting, expected in by_hand.items():
        awft = np.stack([w[..., 0].mean(-1).numpy() for w, _, _ in expected])
        norms = np.stack([n.numpy() for _, n, _ in expected])
        scores = {"awft": awft, "ahon_ln": norms / norms.mean(-1, keepdims=True)}
        for name, values in scores.items():
            label = f"{name}/{setting[0]}-{setting[1]}-x{setting[2]}"
            np.testing.assert_allclose(arrays[label], values, rtol=1e-5)
            tau = found["thresholds"][name]
            share = np.mean(values > tau if name == "awft" else values < tau)
            assert rows[setting]["inactive"][name] == pytest.approx(share, abs=1.1 / values.size)
            shares.add(rows[setting]["inactive"][name])
            by_head = np.mean(rows[setting]["inactive_by_head"][name])
            assert by_head == pytest.approx(rows[setting]["inactive"][name])
        if setting == (14, "add", 1):  # 15 % of the heads, as near as 16 scores come
            assert rows[setting]["inactive"]["awft"] == pytest.approx(0.15, abs=1 / 16)
    assert len(shares) > 3


def test_the_files(swept):
    found, rows = rows_of(swept)
    with (swept / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows) == 8
    for line, row in zip(lines, found["rows"], strict=True):
        assert float(line["sink_rate"]) == row["metrics"]["sink_rate"]["number"]
        assert line["bos"] == row["bos"]
    for name in ("sweep", "masks"):
        assert (swept / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (swept / "report.html").read_text()
    assert page.count("<img ") == page.count("<summary>The numbers</summary>") == 2
    first = found["rows"][0]["inactive_by_head"]["awft"][1][2]
    assert f"layer 1, head 2: {first:.4g}</title>" in page
    assert f"{100 * found['rows'][0]['inactive']['awft']:.4g}</td>" in page
    assert not (swept / "partial").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_that_stopped_goes_on(swept, folder, tmp_path, monkeypatch):
    """The fourth row fails; of the first three nothing runs again."""
    forward, calls = TransformersProbe.forward, []

    def failing(probe, *args, **kwargs):
        if len(calls) == 3 * 2:
            raise UserError("the machine is gone")
        calls.append(args)
        return forward(probe, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersProbe, "forward", failing)
        assert main(command(folder, tmp_path).split()) == 2
    assert not (tmp_path / "sweep.json").exists()

    def counted(probe, *args, **kwargs):
        calls.append(args)
        return forward(probe, *args, **kwargs)

    monkeypatch.setattr(TransformersProbe, "forward", counted)
    assert main(command(folder, tmp_path).split()) == 0
    assert len(calls) == 8 * 2
    assert (tmp_path / "sweep.csv").read_text() == (swept / "sweep.csv").read_text()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ((0.25, 0.5), "from 25.0% (16 tokens) to 50.0% (32 tokens)."),
        ((0.0, 0.0001), "0.0% at any setting."),
    ],
)
def test_what_moves_is_said_and_what_does_not(rates, says):
    rows = [
        SimpleNamespace(
            length=n, bos="none", copies=1, metrics={"sink_rate": MetricResult(None, x)}
        )
        for n, x in zip((16, 32), rates, strict=True)
    ]
    results = SimpleNamespace(rows=rows, model=SimpleNamespace(name="model"))
    (line,) = sweep_page.in_words(results)
    assert line == f"model, heads with an attention sink on the first token: {says}"


def test_a_sample_with_nan_is_named(folder, tmp_path, monkeypatch, capsys):
    """In the second row alone, whose sequences are the longer ones."""
    attended = TransformersProbe._gated

    def broken(probe, index, gated_BTX):
        if gated_BTX.shape[1] == 10 and not broken.done:
            broken.done = True
            probe._calls[index].out_BHTD.fill_(torch.nan)
        attended(probe, index, gated_BTX)

    broken.done = False
    monkeypatch.setattr(TransformersProbe, "_gated", broken)
    flags = f"sweep {folder}/model --data {folder}/texts.jsonl --output {tmp_path} --device cpu"
    assert main(f"{flags} --lengths 8 10 --bos none --batch-size 1".split()) == 0
    error = capsys.readouterr().err
    assert "warning: 1 samples of 10 tokens, 1 copy, without BOS have infinite or NaN" in error
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["samples"] for row in rows] == [2, 1]
    assert rows[1]["non_finite"] == [f"{folder}/texts.jsonl:1"]


def test_two_processes_share_a_sweep(swept, folder, pool, tmp_path):
    task = "tests.analysis.capture.megatron_tasks:swept"
    arguments = {"command": command(folder, tmp_path / "out"), "store": str(tmp_path / "store")}
    assert pool.run(task, Layout(dp=2), **arguments) == [0, 0]
    for name in ("sweep.csv", "sweep.json"):
        ours, theirs = ((path / name).read_text() for path in (tmp_path / "out", swept))
        assert ours == theirs
    assert not (tmp_path / "out" / "partial").exists()


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (
            "--lengths 1 --first-token-copies 0",
            ["--lengths 1: use 2 or more", "copies 0: use 1 or more"],
        ),
        (
            "--lengths 8 8 --attn-implementation eager",
            ["--lengths 8 8: pass each value once"],
        ),
        ("--lengths 40", ["no text of 40 tokens (the longest has", "use --lengths of at most"]),
        ("--lengths 62 --first-token-copies 4", ["sequences of 65 tokens", "64 positions"]),
    ],
)
def test_bad_input_is_named(folder, tmp_path, capsys, flags, problems):
    command = f"sweep {folder}/model --data {folder}/texts.jsonl --output {tmp_path} --device cpu"
    assert main(f"{command} {flags}".split()) == 2
    said = capsys.readouterr().err
    for problem in problems:
        assert problem in said


@pytest.mark.usefixtures("undrawn")
def test_a_tokenizer_without_bos(folder, tmp_path, capsys):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    tokenizer.bos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = f"sweep {folder}/model --tokenizer {tmp_path}/tokenizer --data {folder}/texts.jsonl"
    command += f" --output {tmp_path}/out --lengths 8 --device cpu --bos"
    assert main([*command.split(), "add"]) == 2
    assert "has no BOS token; use auto" in capsys.readouterr().err
    assert main([*command.split(), "auto", "none"]) == 0
    rows = json.loads((tmp_path / "out" / "sweep.json").read_text())["rows"]
    assert [row["bos"] for row in rows] == ["none"]
