import json
import random

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import load_tokenizer, tokenizer_hash, train_tokenizer
from megasink.errors import UserError

HARD = [
    "",
    " ",
    "   leading and trailing   ",
    "\tdef f(x):\r\n\t    return  x\n\n\n",
    "é e\u0301 ﬁ ½ 漢字かな ไทย عربى 👨‍👩‍👧 \U0010ffff",
    "zero\u200bwidth \u00a0 \u3000 \ufeff \ufffd",
    "literal \u2581 and \u2585, <0x0A> and <unk>",
    "nul \0 bell \a",
    "don't I 'll , . ! n't",  # what clean_up_tokenization_spaces would eat
    "1234567890 3.14e-10",
]
ALPHABET = [
    *"aaabbb   \n\n\t=-#_'\".:()019éß漢🙂\r\0",
    "\u0301",
    "\u200b",
    "self",
    "    ",
    "\u2581",
]


def hard_strings(count: int) -> list[str]:
    rng = random.Random(0)
    mixed = ["".join(rng.choices(ALPHABET, k=rng.randrange(40))) for _ in range(count)]
    runs = [
        "".join(rng.choice("a =-#\n.") * rng.randint(1, 40) for _ in range(3)) for _ in range(count)
    ]
    return HARD + mixed + runs


def test_any_text_comes_back(tokenizer):
    for text in hard_strings(3000):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert tokenizer.convert_tokens_to_string(tokens) == text


def test_ids_are_those_of_sentencepiece(twins, sources):
    # U+2581 is left out: sentencepiece itself turns it into a space
    strings = [s for s in hard_strings(3000) + sources if "\u2581" not in s]
    wrong = [s for s in strings if twins.hf.encode(s).ids != twins.sp.encode(s)]
    assert not wrong, wrong[:3]


def test_what_was_learned_is_used(tokenizer, sources):
    text = sources[0]
    assert len(text) / len(tokenizer(text).input_ids) > 2
    assert tokenizer.tokenize("2048") == list("2048")
    assert tokenizer.tokenize("\u2581") == ["<0xE2>", "<0x96>", "<0x81>"]


def test_tabs_are_learned_and_marks_of_sentencepiece_do_not_stop_it(sources, tmp_path):
    code = sources[0].replace("    ", "\t").replace("\n", "\u2585\n")
    train_tokenizer([Document(code, "test")], 800, tmp_path / "tabs")
    tokenizer = load_tokenizer(tmp_path / "tabs")
    assert tokenizer.tokenize("\t\tx") == ["\t\t", "x"]
    assert tokenizer.tokenize("\u2585") == ["<0xE2>", "<0x96>", "<0x85>"]
    assert tokenizer.decode(tokenizer(code).input_ids) == code


def test_special_tokens(folder, tokenizer):
    assert len(tokenizer) == 1024
    assert (tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer("x<|endoftext|>").input_ids[-1] == 1
    assert sorted(p.name for p in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral", "gpt_oss"])
def test_a_model_folder_keeps_the_tokenizer(folder, tokenizer, tmp_path, model_type):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    exported = AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD:
        assert exported(text).input_ids == tokenizer(text).input_ids
        assert exported.decode(exported(text).input_ids) == text


def test_training_is_deterministic_and_the_sample_bounded(sources, tmp_path):
    documents = [Document(s, "test") for s in sources]
    size = sum(len(s.encode()) for s in sources)
    options = {"sample_bytes": 100_000, "seed": 3}
    first = train_tokenizer(documents, 600, tmp_path / "a", **options)
    train_tokenizer(documents, 600, tmp_path / "b", **options)
    train_tokenizer(documents, 600, tmp_path / "c", **options | {"seed": 4})
    a, b, c = ((tmp_path / n / "tokenizer.json").read_bytes() for n in "abc")
    assert a == b != c
    assert first.corpus_bytes == size
    assert 80_000 < first.sample_bytes < 120_000


def test_an_existing_folder_is_kept(folder, sources, tmp_path):
    documents = [Document(sources[0], "test")]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    with pytest.raises(UserError, match="mine exists: use it with --tokenizer, or pass --overwri"):
        train_tokenizer(documents, 400, mine)
    with pytest.raises(UserError, match="mine contains files other than a tokenizer"):
        train_tokenizer(documents, 400, mine, overwrite=True)
    assert (mine / "notes.txt").read_text() == "keep"
    train_tokenizer(documents, 400, tmp_path / "ours")
    train_tokenizer(documents, 410, tmp_path / "ours", overwrite=True)
    assert len(load_tokenizer(tmp_path / "ours")) == 410


def test_vocabulary_sizes_that_cannot_be(tmp_path):
    greek = Document("αβγδεζηθικλμνξοπρστυφχψω " * 3 + "".join(map(chr, range(0x4E00, 0x4F00))), "")
    with pytest.raises(UserError, match="vocabulary size 300 is too small: use 320 or more"):
        train_tokenizer([greek], 300, tmp_path / "a")
    with pytest.raises(UserError, match=r"characters need a vocabulary size of at least \d+: give"):
        train_tokenizer([greek], 330, tmp_path / "a")
    with pytest.raises(UserError, match=r"words allow a vocabulary size of at most \d+: give"):
        train_tokenizer([greek], 50_000, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_folders_that_hold_no_usable_tokenizer(tmp_path):
    with pytest.raises(UserError, match="absent: no such folder; nothing is downloaded"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match="transformers cannot load the tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')  # it gets an empty tokenizer
    with pytest.raises(UserError, match="has no tokenizer files, such as"):
        load_tokenizer(tmp_path)
    no_eod = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    no_eod.save_pretrained(tmp_path / "no_eod")
    with pytest.raises(UserError, match="no end-of-document token: set `eos_token`"):
        load_tokenizer(tmp_path / "no_eod")


def test_remote_code_is_refused(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass T: pass\n")
    config = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="transformers cannot load the tokenizer in"):
        load_tokenizer(tmp_path)
    assert not ran.exists()


def test_the_hash_is_of_the_meaning_of_ids(folder, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert tokenizer_hash(copy) == tokenizer_hash(tokenizer)
    copy.add_tokens(["another"])
    assert tokenizer_hash(copy) != tokenizer_hash(tokenizer)
