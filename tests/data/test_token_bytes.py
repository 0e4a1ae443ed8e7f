import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megasink.data.token_bytes import dummy_prefix_bytes, token_bytes
from megasink.errors import UserError

TEXTS = [
    "hello there, it's 2048",
    "   leading\n\n\ttabs and  two spaces \r\n",
    "naïve слово 漢字 🙂 \u2585 \U0010ffff",
    "\u0000\u00a0\u3000",
    " ",
    "",
]


def total(tokenizer, text: str) -> int:
    return int(token_bytes(tokenizer)[tokenizer.encode(text, add_special_tokens=False)].sum())


def wrap(backend: Tokenizer, **options) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def byte_level(sources, **options) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(sources[:1], trainer)
    return backend


def llama_like(tokenizer, *, dummy_prefix: bool) -> PreTrainedTokenizerFast:
    """The trained tokenizer written as Llama 2's (or, with no dummy prefix, Gemma's) is."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    model["vocab"] = {t.replace(" ", "\u2581"): i for t, i in model["vocab"].items()}
    model["merges"] = [[p.replace(" ", "\u2581") for p in pair] for pair in model["merges"]]
    backend = Tokenizer.from_str(json.dumps(state | {"pre_tokenizer": None}))
    prepend = [normalizers.Prepend("\u2581")] if dummy_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return wrap(backend, eos_token="<|endoftext|>")


@pytest.mark.parametrize("text", [*TEXTS, "a literal \u2581"])
def test_our_tokenizer(tokenizer, text):
    assert total(tokenizer, text) == len(text.encode())
    assert dummy_prefix_bytes(tokenizer) == 0


def test_special_tokens_count_nothing(tokenizer):
    lengths = token_bytes(tokenizer)
    assert lengths.shape == (1024,)
    assert lengths[:3].tolist() == [0, 0, 0]
    assert (lengths[3:] > 0).all()
    assert lengths[tokenizer.convert_tokens_to_ids("<0x00>")] == 1


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_byte_level(sources, add_prefix_space):
    gpt2 = wrap(byte_level(sources, add_prefix_space=add_prefix_space), eos_token="<|endoftext|>")
    gpt2.add_tokens(["hello there"])  # matched as written, so it counts as written
    assert token_bytes(gpt2)[gpt2.convert_tokens_to_ids("hello there")] == 11
    assert token_bytes(gpt2)[gpt2.eos_token_id] == 0
    assert dummy_prefix_bytes(gpt2) == add_prefix_space
    for text in ["two words", "naïve слово 漢字 🙂\n\n\t", "x"]:
        assert total(gpt2, text) == len(text.encode()) + add_prefix_space


@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_sentencepiece_spaces(tokenizer, dummy_prefix):
    llama = llama_like(tokenizer, dummy_prefix=dummy_prefix)
    assert llama.tokenize("a b")[-1].startswith("\u2581")
    assert dummy_prefix_bytes(llama) == dummy_prefix
    for text in TEXTS[:-1]:
        assert total(llama, text) == len(text.encode()) + dummy_prefix


def test_a_kind_that_keeps_no_spaces_is_refused():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="with WordPiece decoder"):
        token_bytes(wrap(backend))
    backend.decoder = None
    with pytest.raises(UserError, match="with no decoder"):
        token_bytes(wrap(backend))


def test_a_tokenizer_that_rewrites_text_is_refused(sources):
    backend = byte_level(sources, add_prefix_space=False)
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    with pytest.raises(UserError, match="do not add up to the bytes of 'naïve"):
        token_bytes(wrap(backend))


def test_a_run_on_letters_alone_has_no_bits_per_byte(tmp_path, capsys):
    from argparse import Namespace

    from megasink.training.dataset import bytes_per_token

    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrap(backend, eos_token="</s>").save_pretrained(tmp_path)
    args = Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path), rank=0)
    assert bytes_per_token(args) is None
    assert "losses are reported per token only" in capsys.readouterr().out
