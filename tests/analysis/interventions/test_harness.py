"""Scores of a probed model by lm-eval: what is scored, whatever the batches."""

from dataclasses import replace

import pytest
import torch

from megasink.analysis.capture.probe import Listener
from megasink.analysis.evaluate.harness import evaluate
from megasink.analysis.evaluate.tasks_loading import load_tasks
from megasink.analysis.interventions import DynamicZeroing, RemoveBos, RepeatFirstToken
from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import load_tokenizer, train_tokenizer
from megasink.errors import UserError
from tests.analysis.capture.tiny_models import tiny_model
from tests.analysis.interventions.harness_tasks import (
    CHOICES,
    TEXTS,
    Reading,
    answers,
    by_lm_eval,
    compare,
    probed,
    responses,
    write_tasks,
)
from tests.distributed.layout import SINGLE

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

POSITIONS = 40
SCORES = DynamicZeroing("awft", 0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tasks, and tokenizers with and without BOS."""
    root = tmp_path_factory.mktemp("harness")
    documents = [Document(text, "here") for text in (*TEXTS, *(str(item) for item in CHOICES))]
    for bos in (False, True):
        train_tokenizer(documents, 340, root / f"bos-{bos}", bos=bos)
    return root


@pytest.fixture(scope="module")
def tasks(folder):
    write_tasks(folder / "tasks")
    return load_tasks(["choice", "text", "answer"], folders=[folder / "tasks"])


@pytest.fixture(scope="module")
def models(folder):
    """A Llama with each of the tokenizers."""
    found = []
    for bos in (False, True):
        tokenizer = load_tokenizer(folder / f"bos-{bos}")
        tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
        llama = tiny_model("llama", vocab_size=360, max_position_embeddings=POSITIONS)
        llama.generation_config.eos_token_id = tokenizer.eos_token_id
        found.append(probed(llama, tokenizer))
    return found


@pytest.mark.parametrize("batch_size", [1, 4, "auto"])
def test_without_interventions_scores_are_those_of_lm_eval(models, tasks, batch_size):
    options = {"parse_special_tokens": True, "samples": True}
    results = evaluate(models[0], [], tasks, batch_size=batch_size, **options)
    expected = by_lm_eval(models[0], tasks)
    compare(
        answers(results),
        {n: [r for e in s for r in responses(e["resps"])] for n, s in expected["samples"].items()},
    )
    choice = results.tasks["choice"]
    assert choice.metrics["acc"].value == expected["results"]["choice"]["acc,none"]
    assert choice.metrics["acc"].standard_error == pytest.approx(
        expected["results"]["choice"]["acc_stderr,none"]
    )
    assert (choice.documents, choice.version) == (len(CHOICES), "3")
    assert choice.metrics["acc"].higher_is_better


def test_nothing_is_padded_and_id_0_is_a_token(models, folder):
    """<|unk|> has the id 0, with which lm-eval pads."""
    model = models[0]
    items = [
        {"context": "the", "choices": ["<|unk|><|unk|>", " dog sat on"], "answer": 0},
        {"context": "<|unk|><|unk|> the cat", "choices": [" sat<|unk|>", " sat"], "answer": 1},
    ]
    zeros = load_tasks(["choice"], folders=[write_tasks(folder / "zeros", choices=items)])
    reading = Reading(model)
    options = {"parse_special_tokens": True, "samples": True}
    results = evaluate(reading.model, [SCORES], zeros, batch_size=4, **options)
    encode = model.tokenizer.encode
    expected = {
        tuple(encode(item["context"] + choice)[:-1]) for item in items for choice in item["choices"]
    }
    assert set(reading.rows) == expected
    assert len(reading.rows) == len(expected), "what requests share is read once"
    assert encode("<|unk|>") == [0]
    scores = []
    for item in items:
        for choice in item["choices"]:
            whole, start = encode(item["context"] + choice), len(encode(item["context"]))
            change = SCORES.running()
            with model.open_probe(Listener(), [change]) as probe:
                logits = probe.forward(torch.tensor([whole[:-1]])).logits[0].double()
            logs = logits.log_softmax(-1)[start - 1 :]
            scores.append(float(logs.gather(1, torch.tensor(whole[start:])[:, None]).sum()))
    assert [r[0] for r in answers(results)["choice"]] == pytest.approx(scores, abs=2e-5)


def test_bos_stands_once_before_every_text(models, tasks, folder):
    model = models[1]
    bos = model.tokenizer.bos_token_id
    reading = Reading(model)
    evaluate(reading.model, [], tasks)
    assert all(row[0] == bos and bos not in row[1:] for row in reading.rows)
    items = [{"context": "<|bos|>the cat", "choices": [" sat", " sang"], "answer": 0}]
    own = load_tasks(["choice"], folders=[write_tasks(folder / "own-bos", choices=items)])
    reading = Reading(model)
    evaluate(reading.model, [], own, parse_special_tokens=True)
    assert {row[:2].count(bos) for row in reading.rows} == {1}


def test_long_contexts_lose_their_beginning_as_in_lm_eval(models, folder):
    long = " ".join(TEXTS * 6)
    items = [{"context": long, "choices": [" sat", " sang a song"], "answer": 0}]
    cut = load_tasks(
        ["choice", "text", "answer"],
        folders=[write_tasks(folder / "long", choices=items, texts=[long])],
    )
    reading = Reading(models[0])
    results = evaluate(reading.model, [], cut, samples=True)
    expected = by_lm_eval(models[0], cut)["samples"]
    assert {len(row) for row in reading.rows} <= {POSITIONS, *range(1, POSITIONS)}
    assert max(len(row) for row in reading.rows) == POSITIONS
    assert results.cut == 2
    compare(
        answers(results),
        {n: [r for e in s for r in responses(e["resps"])] for n, s in expected.items()},
    )


def test_the_first_tokens_of_a_model_stand_before_everything(models, tasks):
    model = replace(models[1], first=(7, 9))
    reading = Reading(model)
    evaluate(reading.model, [], tasks)
    assert {row[:3] for row in reading.rows} == {(7, 9, model.tokenizer.bos_token_id)}
    long = [9] * POSITIONS
    from megasink.analysis.evaluate.harness_model import HarnessModel

    asked = HarnessModel(model, None, [], 1)
    tokens, _ = asked._row(long, [4, 5])
    assert tokens == (7, 9, *long[: POSITIONS - 3], 4)
    assert len(tokens) == POSITIONS


def test_a_special_token_in_a_task_is_text_unless_it_is_parsed(models):
    from megasink.analysis.evaluate.harness_model import HarnessModel

    tokenizer = models[1].tokenizer
    bos, text = tokenizer.bos_token_id, f"{tokenizer.bos_token} {tokenizer.eos_token}"
    plain, parsed = (
        HarnessModel(models[1], None, [], 1, parse_special_tokens=parse).tok_encode(text)
        for parse in (False, True)
    )
    assert plain == [
        bos,
        *tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True),
    ]
    assert parsed == tokenizer.encode(text, add_special_tokens=False)
    assert (plain.count(bos), parsed.count(bos)) == (1, 1)
    assert tokenizer.eos_token_id in parsed


def test_without_anything_before_it_a_token_does_not_count(models, tasks):
    model = models[1]
    results = evaluate(model, [RemoveBos()], tasks, samples=True)
    # One of each text, and of the two choices without a context.
    assert results.unscored == len(TEXTS) + 2
    for text, score in zip(TEXTS, answers(results)["text"], strict=True):
        ids = torch.tensor(model.tokenizer.encode(text, add_special_tokens=False))
        with torch.no_grad():
            logs = model.module(ids[None, :-1]).logits[0].log_softmax(-1) if len(ids) > 1 else None
        expected = 0.0 if logs is None else float(logs.gather(1, ids[1:, None]).sum())
        assert score == pytest.approx(expected, abs=2e-5)


def test_repeated_tokens_are_read_and_not_scored(models, tasks):
    reading = Reading(models[1])
    results = evaluate(reading.model, [RepeatFirstToken(3)], tasks)
    bos = models[1].tokenizer.bos_token_id
    assert {row[:3] for row in reading.rows} == {(bos, bos, bos)}
    assert results.unscored == 0
    assert results.interventions == [{"kind": "repeat-first-token", "copies": 3}]


def test_what_is_scored_stays_as_it_is(models, tasks, monkeypatch):
    monkeypatch.setattr(RemoveBos, "tokens", lambda self, tokens, bos: [*tokens[:-1], 5])
    with pytest.raises(UserError, match="changed or removed tokens that a task scores"):
        evaluate(models[1], [RemoveBos()], tasks)


def test_models_that_cannot_be_scored(models, tasks):
    model = models[0]
    body = model.module.model
    body.config.prefix_lm_tokens = 4
    try:
        with pytest.raises(UserError, match=r"first 4 tokens .*--prefix-lm-tokens"):
            evaluate(model, [], tasks)
    finally:
        del body.config.prefix_lm_tokens
    with pytest.raises(UserError, match=r"scores a continuation of \d+ tokens, .* has 3 positions"):
        evaluate(replace(model, positions=3), [], tasks)


def test_without_generate_answers_are_the_same(models, tasks):
    """As for a run, by whole forward passes."""
    plain = answers(evaluate(models[0], [], tasks, samples=True))["answer"]
    looped = replace(models[0], module=models[0].module.model)
    assert answers(evaluate(looped, [], tasks, samples=True, batch_size=2))["answer"] == plain
    assert any(plain)


def test_chat_template(models, tasks):
    found = evaluate(models[0], [], tasks, samples=True, chat_template=True).samples["answer"]
    assert [entry["arguments"][0][0] for entry in found] == [f"<{text[:9]}>" for text in TEXTS]


def test_a_batch_without_memory_is_halved(models, tasks):
    reading = Reading(models[0])
    inner = reading.model.open_probe

    def open_probe(listener, changes=()):
        probe = inner(listener, changes)
        forward = probe.forward

        def short_of_memory(ids):
            if len(ids) > 1:
                raise torch.OutOfMemoryError
            return forward(ids)

        probe.forward = short_of_memory
        return probe

    model = replace(models[0], open_probe=open_probe)
    compare(
        answers(evaluate(model, [], tasks, samples=True)),
        answers(evaluate(models[0], [], tasks, samples=True)),
    )
    with pytest.raises(UserError, match=r"memory for a batch of 4 .*: lower --batch-size"):
        evaluate(model, [], tasks, batch_size=4)


@pytest.mark.parametrize(
    ("options", "heads"),
    [({"attention_variant": "sink"}, [(1, 2)]), ({"attention_variant": "gated"}, [])],
    ids=["sink-zeroed", "gated"],
)
def test_a_run_is_scored_as_by_hand(pool, folder, tasks, options, heads):
    (report, *_) = pool.run(
        "tests.analysis.interventions.harness_runs:run_scored",
        SINGLE,
        folder=str(folder / "tasks"),
        heads=heads,
        **options,
    )
    assert report["scores"] == pytest.approx(report["by hand"], abs=5e-5)
    assert report["answers"] == report["answers by hand"]
