"""Fine-tuning and surgery of examples/real_models: the data, the rounding, what the page says."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real_models import balance, chats, page, rounding, surgery, training
from examples.real_models.training_figure import draw_balance, draw_surgery
from megasink.analysis.api import load_model
from megasink.cli import main as megasink
from megasink.finetune.chats import Chat, ChatTokenizer

SOURCE = '''
def long_enough(graph, *, weight=None):
    """Return something of a graph that
    is worth a sentence.

    More of it.
    """
class Tree:
    """A tree of nodes, each with a parent but the first one."""
    def depth(self, node, root): "The number of edges between the node and its root."
    def short(self): "Too short."
    def _private(self): "A docstring of something that nobody outside should call."
def elsewhere(): "A docstring with a letter that is not of ASCII, such as \u00e9."
'''
# As SmolLM2's; the system message of its own is left out.
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def talking(model):
    """The tiny model, with a chat template that marks nothing, and conversations."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "[UNK]", "eos_token": "[UNK]"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    words = [f"{a}{b}ing" for a in "bcdfgh" for b in "aeiou"]
    folder = model.parent / "runs/real-models"
    said = [" ".join(np.random.default_rng(n).choice(words, 9)) for n in range(80)]
    made = [chats.Documented("m", f"f{n}", text, ("a",)) for n, text in enumerate(said)]
    lines = [json.dumps({"messages": chats.messages(each)}) + "\n" for each in made]
    (folder / "chats.jsonl").write_text("".join(lines))
    asked = [json.dumps(item) + "\n" for item in chats.quiz(made[:5], made[5:])]
    (folder / "quiz.jsonl").write_text("".join(asked))
    return model


def test_what_is_documented():
    found = list(chats.documented(SOURCE, "a.module"))
    assert [each.name for each in found] == ["long_enough", "Tree", "Tree.depth"]
    assert found[0].question == "What does `long_enough` in a.module do?"
    assert found[0].answer == (
        "Return something of a graph that is worth a sentence. It takes graph."
    )
    assert found[1].answer.endswith("It takes no arguments.")
    assert found[2].answer.endswith("its root. It takes node and root.")


def test_a_question_has_one_right_answer_of_like_length():
    every = [
        chats.Documented(("one", "two")[n % 2] + ".m", f"f{n}", "x" * (40 + n), ())
        for n in range(60)
    ]
    found = chats.quiz(every[:20], every[20:])
    for item, each in zip(found, every, strict=False):
        assert item["choices"][item["answer"]] == each.summary
        assert len(set(item["choices"])) == chats.CHOICES
        others = {o.summary for o in every[20:] if o.module == each.module}
        assert set(item["choices"]) - {each.summary} <= others
    assert len({item["answer"] for item in found}) == chats.CHOICES


def test_what_the_assistant_says_is_learned(talking):
    reader = ChatTokenizer(talking)
    messages = [{"role": "user", "content": "beiing"}, {"role": "assistant", "content": "bading b"}]
    _, labels = reader.read(Chat("", messages))
    learned = [label for label in labels if label != -100]
    assert learned == reader.tokenizer("bading b<|im_end|>", add_special_tokens=False)["input_ids"]


def test_answers_are_scored_as_whole_texts_are(talking):
    hub = load_model(talking, device="cpu")
    lines = (talking.parent / "runs/real-models/quiz.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines[:2]]
    found = chats.quiz_scores(hub.model, hub.tokenizer, items)
    for item, row in zip(items, found, strict=True):
        asked = [{"role": "user", "content": item["question"]}]
        prompt = hub.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for choice, value in zip(item["choices"], row, strict=True):
            ids = hub.tokenizer(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = hub.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logp = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
            assert value == pytest.approx(float(logp.mean()), abs=1e-5)


def test_rounding_is_to_nearest_by_the_largest():
    values = torch.tensor([[0.2, -1.0, 0.46], [70.0, 1.0, -35.4]])
    found = rounding.rounded(values, 4, by_row=True)
    steps = torch.tensor([[1.0, -7.0, 3.0], [7.0, 0.0, -4.0]])
    torch.testing.assert_close(found, steps * torch.tensor([[1 / 7], [10.0]]))
    # One large value takes the others' digits where the tensor has one scale.
    assert rounding.rounded(values, 4, by_row=False)[0].tolist() == [0, 0, 0]
    assert rounding.rounded(torch.zeros(2, 2), 8, by_row=True).tolist() == [[0, 0], [0, 0]]


@torch.no_grad()
def test_a_model_is_rounded_and_as_it_was_after(model):
    net = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.arange(20)[None]
    before = net(ids).logits
    with rounding.rounding(net, 16, 16, by_row=True):
        close = net(ids).logits
    with rounding.rounding(net, 4, 0, by_row=False):
        layer = net.model.layers[1].mlp.down_proj.weight
        assert len(layer.unique()) <= 15
        weights_alone = net(ids).logits
    with rounding.rounding(net, 0, 4, by_row=False):
        activations_alone = net(ids).logits
    assert torch.equal(net(ids).logits, before)
    scale = before.std()
    assert (close - before).std() < 0.02 * scale
    for far in (weights_alone, activations_alone):
        assert 0.1 * scale < (far - before).std()
    found = rounding.outliers(SimpleNamespace(model=net), [ids])
    hidden = net(ids, output_hidden_states=True).hidden_states[1:-1]
    for kind, begin in (("all", 0), ("without the first", 1)):
        parts = (h[0, begin:].double().numpy().ravel() for h in hidden)
        expected = [stats.kurtosis(part, fisher=False) for part in parts]
        np.testing.assert_allclose(found["kurtosis"][kind], expected, atol=0.006)
    norms = torch.cat(hidden).norm(dim=-1)
    ratio = (norms.max(1).values / norms.sort(1).values[:, 9]).max()  # torch's median of 20
    np.testing.assert_allclose(found["longest"], [ratio], atol=0.006)


def test_numbers_of_runs():
    before = {"importance": [[0.9, 0.1, 0.5, 0.2]], "imbalance": 0.7, "quiz": [[-1, -2]]}
    after = before | {"importance": [[0.9, 0.7, 0.8, 0.3]], "quiz": [[-1, -2], [-3, -1]]}
    found = {name: number(after, before) for name, number in training.NUMBERS.items()}
    # 0.7 is within a fifth of 0.9 and 0.3 is not; the three highest were 0.9, 0.5 and 0.2.
    expected = [0.7, 0.675, 0.35, 1, 0, (0 + 0.3 + 0.1) / 3]
    assert list(found.values())[:6] == pytest.approx(expected)
    assert found["quiz, share right"] == 0.5
    assert found["quiz, margin in nats per token"] == -0.5
    one, other = np.random.default_rng(0).normal(size=(2, 5))
    apart = training.difference(one, other)
    expected = stats.ttest_rel(one, other).confidence_interval()
    np.testing.assert_allclose(apart["interval"], expected)


@pytest.fixture
def here(monkeypatch):
    """Commands of megasink run in this process."""

    def command(*words):
        assert megasink([*words]) == 0

    monkeypatch.setattr(balance, "command", command)


def test_four_arms_begin_alike_and_go_on(talking, here, monkeypatch, tmp_path):
    pytest.importorskip("trl")
    monkeypatch.setattr(balance, "SEEDS", 1)
    monkeypatch.setattr(balance, "ARMS", {"none": (0.0, 0), "eq7": (1e-2, 0)})
    monkeypatch.setattr(balance, "SETTINGS", {"--seq-length": 64, "--epochs": 0.1, "--lr": 1e-2})
    assert balance.main([str(talking)]) == 0
    path = talking.parent / "runs/real-models/balance-own.jsonl"
    before, found = training.by_seed(path)
    assert np.shape(before["importance"]) == (4, 3)
    assert all(np.isfinite(values["held-out loss"]).all() for values in found.values())
    runs = talking.parent / "runs/real-models/own.balance"
    one, other = (json.loads((runs / f"{arm}-0/settings.json").read_text()) for arm in found)
    assert one["settings"].pop("head_balance_coeff") == 0
    assert other["settings"].pop("head_balance_coeff") == 1e-2
    assert one == other
    written = path.read_bytes()
    lines = written.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # as a kill leaves it
    assert balance.main([str(talking)]) == 0
    again = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert again == [json.loads(line) for line in lines]


def test_three_variants_from_the_start_to_the_page(talking, monkeypatch):
    model = talking
    net = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():  # weights of the fixture are so large that the last bit counts
        for weight in net.parameters():
            weight.div_(5)
    net.save_pretrained(model)
    for name, value in (("STEPS", 2), ("ROUNDS", (0, 1)), ("TOKENS", 16), ("TEXTS", 4)):
        monkeypatch.setattr(surgery, name, value)
    monkeypatch.setattr(surgery, "MEASURED_TOKENS", 16)
    monkeypatch.setattr(rounding, "TEXTS", 2)
    texts = surgery.read_texts()
    monkeypatch.setattr(surgery, "whole_files", lambda _: texts)
    assert surgery.main([str(model)]) == 0
    path = model.parent / "runs/real-models/surgery-own.jsonl"
    found = training.surgery(path)
    assert set(found) == {(arm, steps) for arm in surgery.ARMS for steps in (0, 2)}
    first = {arm: np.mean(found[arm, 0]["awft"]) for arm in surgery.ARMS}
    assert first["sink"] < 0.9 * first["vanilla"]
    assert found["gated", 2]["loss"] != found["vanilla", 2]["loss"]
    rows = list(page.surgery_table(path))
    assert len(rows) == 2 + len(training.surgery_numbers(found["sink", 2], found["vanilla", 0]))
    draw_surgery(path, model.parent / "surgery.png")
    written = path.read_bytes()
    assert surgery.main([str(model)]) == 0
    assert path.read_bytes() == written


def test_pictures_of_the_committed_results(tmp_path):
    draw_balance(page.RESULTS / "balance-smollm2.jsonl", tmp_path / "balance.png")
    draw_surgery(page.RESULTS / "surgery-smollm2.jsonl", tmp_path / "surgery.png")
    for picture in tmp_path.iterdir():
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2
