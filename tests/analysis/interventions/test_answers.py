"""Generated answers are greedy transformers', one by one, wherever rows of a batch end."""

import itertools
import json
import random
from collections import Counter

import pytest
import torch

from megasink.errors import UserError
from tests.analysis.capture.tiny_models import WINDOW, tiny_model
from tests.analysis.interventions.harness_runs import character_tokenizer
from tests.analysis.interventions.harness_tasks import probed, write_tasks
from tests.convert.test_commands import megasink

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

MODELS = ("llama", "mistral", "gemma-3", "gpt-oss", "qwen3.5", "own-sink")
PROMPTS, NEW, POSITIONS = 34, 9, 64


def chat_tokenizer(**special):
    """One token for each character, and four special ones: <eos> and the end of a turn."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(
        {"pad_token": "<pad>", "additional_special_tokens": ["<turn>", "<other>"], **special}
    )
    return tokenizer


def prompts(seed=0, count=PROMPTS):
    """Texts of 1 to 80 characters: shorter and longer than a window, and than all positions."""
    chance = random.Random(seed)
    lengths = [1, 2, WINDOW, 3 * WINDOW, 80] + [chance.randint(1, 40) for _ in range(count - 5)]
    letters = "".join(map(chr, range(97, 123)))
    return ["".join(chance.choices(letters, k=length)) for length in lengths]


@torch.no_grad()
def greedy(model, tokenizer, text, new=NEW):
    """The new tokens of one text, by transformers."""
    ids = tokenizer(text, return_tensors="pt").input_ids[:, -(POSITIONS - new) :]
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return out[0, ids.shape[1] :].tolist()


def answer(tokens, tokenizer, ends, stops=()):
    """The text before the first end, and before the first stop string."""
    end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
    return min((text.split(stop)[0] for stop in stops), key=len, default=text)


def answered(model, texts, batch_size, **generation):
    """What lm-eval gets of a model."""
    from lm_eval.api.instance import Instance

    from megasink.analysis.capture.probe import Listener
    from megasink.analysis.evaluate.harness_model import HarnessModel

    generation = {"until": [], "max_gen_toks": NEW, "do_sample": False} | generation
    with model.open_probe(Listener()) as probe:
        asked = [Instance("generate_until", {}, (text, generation), 0) for text in texts]
        return HarnessModel(model, probe, [], batch_size).generate_until(asked)


def ending(model, tokenizer, texts):
    """Let three tokens end its answers: some at once, others in the middle, some never."""
    model.generation_config.eos_token_id = None
    endless = [greedy(model, tokenizer, text) for text in texts]
    first = Counter(tokens[0] for tokens in endless).most_common(1)[0][0]
    inner = Counter(t for tokens in endless for t in set(tokens[2:]) - {first}).most_common(6)
    ends = [first, inner[-1][0], inner[-2][0]]
    model.generation_config.eos_token_id = ends
    return {*ends, tokenizer.eos_token_id}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """A model, its tokenizer, the tokens that end answers, and those of every text."""
    tokenizer = chat_tokenizer()
    options = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    model = tiny_model(request.param, tie_word_embeddings=False, **options)
    texts = prompts()
    ends = ending(model, tokenizer, texts)
    texts += [text[-12:] for text in texts if len(text) > 11]  # of one length: they share a batch
    return model, tokenizer, ends, {text: greedy(model, tokenizer, text) for text in texts}


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_every_answer_is_that_of_greedy_transformers(case, batch_size):
    model, tokenizer, ends, known = case
    made = list(known.values())
    places = {next((i for i, t in enumerate(m) if t in ends), None) for m in made}
    assert {0, None} < places, "some end at once, and some do not end"
    assert len(places) > 3
    expected = [answer(tokens, tokenizer, ends) for tokens in made]
    assert len(expected) > PROMPTS
    assert answered(probed(model, tokenizer), list(known), batch_size) == expected


def test_left_padding_gives_the_same(case):
    """The answers of one batch of transformers, padded on the left."""
    model, tokenizer, ends, known = case
    texts = [text[:9] for text in known]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    assert not batch.attention_mask.all()
    out = model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    made = out[:, batch.input_ids.shape[1] :].tolist()
    expected = [answer(tokens, tokenizer, ends) for tokens in made]
    assert answered(probed(model, tokenizer), texts, 8) == expected


def test_stop_strings(case):
    """Of one character, of several, and a special token's."""
    model, tokenizer, ends, known = case
    texts, made = list(known), list(known.values())
    words = [answer(tokens, tokenizer, ends) for tokens in made]
    stops = [next(w[2:5] for w in words if len(w) > 5), words[-1][-1:] or "q", "", "<eos>"]
    expected = [answer(t, tokenizer, ends, filter(None, stops)) for t in made]
    assert expected != words
    for size in (1, 5):
        assert answered(probed(model, tokenizer), texts, size, until=stops) == expected


@pytest.mark.parametrize("size", [1, 4])
def test_a_special_token_as_a_stop_string(size):
    """Decoding skips it, so that its text is not found."""
    tokenizer = chat_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=POSITIONS)
    model.generation_config.eos_token_id = None
    texts = [text[:6] for text in prompts()]
    made = [greedy(model, tokenizer, text) for text in texts]
    special = tokenizer.convert_tokens_to_ids(["<turn>", "<other>"])
    # What is most common becomes a special token, by exchanging rows of the output.
    head = model.lm_head.weight
    for token, (common, _) in zip(
        special, Counter(itertools.chain(*made)).most_common(2), strict=True
    ):
        with torch.no_grad():
            head[[token, common]] = head[[common, token]]
    made = [greedy(model, tokenizer, text) for text in texts]
    assert any(special[0] in tokens[:-1] for tokens in made)
    expected = [answer(tokens, tokenizer, {special[0], 0}) for tokens in made]
    assert answered(probed(model, tokenizer), texts, size, until=["<turn>"]) == expected
    # As the end of a turn of a chat, which generation_config.json names.
    model.generation_config.eos_token_id = [0, special[0]]
    assert answered(probed(model, tokenizer), texts, size) == expected


def test_what_generation_config_says_holds_as_in_transformers():
    tokenizer = chat_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=POSITIONS)
    texts = prompts()
    ends = ending(model, tokenizer, texts)
    plain = answered(probed(model, tokenizer), texts, 4)
    model.generation_config.update(repetition_penalty=1.8, temperature=0.6, top_p=0.9)
    model.generation_config.update(return_dict_in_generate=True)
    found = answered(probed(model, tokenizer), texts, 4)
    model.generation_config.update(return_dict_in_generate=False)
    expected = [answer(greedy(model, tokenizer, text), tokenizer, ends) for text in texts]
    assert found == expected != plain


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"num_beams": 4}, "num_beams 4"),
        ({"repetition_penalty": 2.0}, "repetition_penalty 2.0"),
        ({"do_sample": True}, "samples its answers"),
        ({"max_gen_toks": 0}, "generates up to 0 tokens"),
        ({"max_gen_toks": POSITIONS}, f"generates up to {POSITIONS} tokens"),
    ],
)
def test_what_is_not_greedy_is_refused(generation, said):
    tokenizer = chat_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=POSITIONS)
    with pytest.raises(UserError, match=said):
        answered(probed(model, tokenizer), ["abc"], 1, **generation)


def test_a_prompt_without_tokens_begins_with_the_prefix():
    tokenizer = chat_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=POSITIONS)
    ends = ending(model, tokenizer, prompts())
    expected = answer(greedy(model, tokenizer, tokenizer.eos_token), tokenizer, ends)
    assert answered(probed(model, tokenizer), [""], 1) == [expected]


def test_a_run_and_the_folder_that_it_was_answer_alike(pool, tmp_path):
    """By the commands: the end ids of generation_config.json come along with an import."""
    folder, run = tmp_path / "hf", tmp_path / "run"
    tokenizer = chat_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=POSITIONS)
    texts = prompts(seed=1)
    ends = ending(model, tokenizer, texts)
    model.generation_config.update(repetition_penalty=1.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tasks = write_tasks(tmp_path / "tasks", answers=texts, generation=f"{{max_gen_toks: {NEW}}}")
    expected = [answer(greedy(model, tokenizer, text), tokenizer, ends) for text in texts]
    commands = [["convert-from-hf", folder, "--output", run, "--no-verify"]]
    outputs = []
    for which, size in itertools.product((folder, run), (1, 7)):
        outputs.append(tmp_path / f"{which.name}-{size}")
        command = ["evaluate", which, "--tasks", "answer", "--task-folder", tasks, "--samples"]
        command += ["--batch-size", size, "--device", "cpu", "--output", outputs[-1]]
        commands.append(command)
    said = megasink(pool, *commands)
    assert [(code, errors) for code, _, errors in said if code] == []
    for output in outputs:
        lines = (output / "samples/answer.jsonl").read_text().splitlines()
        assert [json.loads(line)["resps"][0][0] for line in lines] == expected, output.name
