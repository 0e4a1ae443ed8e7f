import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megasink.data.token_bytes import token_bytes
from megasink.errors import UserError
from tests.llama_like import llama_like

TEXTS = [
    "hello there, it's 2048",
    "   leading\n\n\ttabs and  two spaces \r\n",
    "naïve слово 漢字 🙂 \u2585 \U0010ffff",
    "\u0000\u00a0\u3000",
    " ",
    "",
]


def total(tokenizer, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return int(token_bytes(tokenizer).lengths[ids].sum())


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


@pytest.mark.parametrize("text", [*TEXTS, "a literal \u2581"])
def test_our_tokenizer(tokenizer, text):
    assert total(tokenizer, text) == len(text.encode())
    assert token_bytes(tokenizer).prefix == 0


def test_special_tokens_count_nothing(tokenizer):
    lengths = token_bytes(tokenizer).lengths
    assert lengths.shape == (1024,)
    assert lengths[:3].tolist() == [0, 0, 0]
    assert (lengths[3:] > 0).all()
    assert lengths[tokenizer.convert_tokens_to_ids("<0x00>")] == 1


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_byte_level(sources, add_prefix_space):
    gpt2 = wrap(byte_level(sources, add_prefix_space=add_prefix_space), eos_token="<|endoftext|>")
    gpt2.add_tokens(["hello there"])  # matched as written, so it counts as written
    assert token_bytes(gpt2).lengths[gpt2.convert_tokens_to_ids("hello there")] == 11
    assert token_bytes(gpt2).lengths[gpt2.eos_token_id] == 0
    assert token_bytes(gpt2).prefix == add_prefix_space
    for text in ["two words", "naïve слово 漢字 🙂\n\n\t", "x"]:
        assert total(gpt2, text) == len(text.encode()) + add_prefix_space


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_sentencepiece_spaces(tokenizer, dummy_prefix, legacy):
    llama = llama_like(tokenizer, dummy_prefix=dummy_prefix, legacy=legacy)
    assert llama.tokenize("a b")[-1].startswith("\u2581")
    assert token_bytes(llama).prefix == dummy_prefix
    for text in TEXTS[:-1]:
        added = dummy_prefix and (legacy or not text.startswith(" "))
        assert total(llama, text) == len(text.encode()) + added


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


@pytest.mark.parametrize("normalizer", ["NFKC", "Nmt"])
def test_compatible_characters_that_become_others_are_refused(sources, normalizer):
    backend = byte_level(sources, add_prefix_space=False)
    backend.normalizer = getattr(normalizers, normalizer)()
    with pytest.raises(UserError, match="drops or rewrites text"):
        token_bytes(wrap(backend))
    backend.normalizer = normalizers.NFC()  # of Qwen: composed text stays as it is
    assert token_bytes(wrap(backend)).prefix == 0


def test_a_run_on_letters_alone_has_no_bits_per_byte(tmp_path, capsys):
    from argparse import Namespace

    from megasink.training.build_datasets import bytes_per_token

    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrap(backend, eos_token="</s>").save_pretrained(tmp_path)
    args = Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path), rank=0)
    assert bytes_per_token(args) is None
    assert "losses are reported only per token" in capsys.readouterr().out
