"""One text has one tokenization: whole or in parts, whatever a tokenizer.json holds beside it."""

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Regex, Tokenizer, models, processors, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from megasink import cli
from megasink.analysis.capture.input_samples import Reader, text_samples
from megasink.data.corpus import Corpus
from megasink.data.encode import Encoder, EncoderSettings
from megasink.data.hf_tokenizer import leading_ids, load_tokenizer
from megasink.data.preprocess import preprocess
from megasink.data.text_tokenizer import parts_of, text_json, text_tokenizer
from megasink.errors import UserError

SPECIAL = ["<unk>", "<s>", "<|endoftext|>"]
SCRIPTS = (
    "Ça ïs naïve — слово, 漢字。 ไทย 🙂👩‍👩‍👧 İstanbul ﬁne A\u030a\u200bß\tx\u00a0y\r\n  1234567 "
    * 12
)


def trained(sources, model, trainer, normalizer=None, pre_tokenizer=None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    options = {"vocab_size": 700, "special_tokens": SPECIAL, "show_progress": False}
    tokenizer.train_from_iterator([sources[0][:60_000], SCRIPTS], trainer(**options))
    return tokenizer


def byte_level(sources, normalizer=None, pre_tokenizer=None, **options) -> Tokenizer:
    def trainer(**of_trainer):
        alphabet = pre.ByteLevel.alphabet()
        return trainers.BpeTrainer(**of_trainer, initial_alphabet=alphabet)

    level = pre.ByteLevel(**options)
    pre_tokenizer = pre.Sequence([pre_tokenizer, level]) if pre_tokenizer else level
    return trained(sources, models.BPE(), trainer, normalizer, pre_tokenizer)


def metaspace(sources, normalizer=None, **options) -> Tokenizer:
    model = models.BPE(unk_token="<unk>")
    return trained(sources, model, trainers.BpeTrainer, normalizer, pre.Metaspace(**options))


def llama(sources) -> Tokenizer:
    """As Llama 2: no pre-tokenizer, so that a text is one word, and a space before it."""
    state = json.loads(metaspace(sources, prepend_scheme="first").to_str())
    tokenizer = Tokenizer.from_str(json.dumps(state | {"pre_tokenizer": None}))
    tokenizer.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    return tokenizer


def word_piece(sources) -> Tokenizer:
    model, bert = models.WordPiece(unk_token="<unk>"), pre.BertPreTokenizer()
    return trained(sources, model, trainers.WordPieceTrainer, norm.BertNormalizer(), bert)


def unigram(sources, **options) -> Tokenizer:
    def trainer(**of_trainer):
        return trainers.UnigramTrainer(**of_trainer, unk_token="<unk>")

    steps = norm.Sequence([norm.NFKC(), norm.Replace(Regex(" {2,}"), " ")])
    return trained(sources, models.Unigram(), trainer, steps, pre.Metaspace(**options))


STRIP = norm.Sequence([norm.NFD(), norm.Strip(), norm.Lowercase()])
BEFORE = pre.Split(" ", "merged_with_previous")
KINDS = {
    "ours": lambda _, ours: Tokenizer.from_str(ours.backend_tokenizer.to_str()),
    "GPT-2": lambda s, _: byte_level(s, add_prefix_space=False),
    "a space before": lambda s, _: byte_level(s, add_prefix_space=True),
    "stripped": lambda s, _: byte_level(s, STRIP, add_prefix_space=True),
    "spaces behind": lambda s, _: byte_level(
        s, None, BEFORE, add_prefix_space=False, use_regex=False
    ),
    "Llama 2": lambda s, _: llama(s),
    "first": lambda s, _: metaspace(s, prepend_scheme="first"),
    "one word": lambda s, _: metaspace(s, prepend_scheme="first", split=False),
    "always": lambda s, _: metaspace(s, norm.NFKC(), prepend_scheme="always"),
    "WordPiece": lambda s, _: word_piece(s),
    "Unigram": lambda s, _: unigram(s),
    "Unigram, first": lambda s, _: unigram(s, prepend_scheme="first"),
}


def texts_of(sources) -> list[str]:
    draw = random.Random(0)
    noise = "".join(draw.choice("ab \n\té漢<>|. ") for _ in range(3000))
    words = " ".join(draw.choice(SCRIPTS.split(" ")) for _ in range(600))
    return [sources[1][:4000], sources[2][5000:9000], SCRIPTS * 2, noise, words, "漢字" * 800]


@pytest.fixture(scope="module", params=KINDS)
def made(request, sources, tokenizer):
    backend = KINDS[request.param](sources, tokenizer)
    backend.add_tokens(["hello there"])
    return backend


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|endoftext|>"
    )


def test_parts_of_a_text_have_the_tokens_of_the_whole(made, sources):
    text_of, state = text_tokenizer(wrapped(made)), text_json(wrapped(made))
    encoder, compared = Encoder(EncoderSettings(state, [7], [1], "uint16")), 0
    for text in texts_of(sources):
        whole = made.encode(text, add_special_tokens=False).ids
        assert text_of.ids(text) == whole
        for size, margin in ((700, 128), (1000, 200), (333, 96)):
            parts = list(parts_of(text, "a", size, margin))
            assert "".join(part.text for part in parts) == text
            assert all(len(part.text) <= size for part in parts[:-1])
            assert len(parts) > 1
            # A batch may hold any of them, and another batch the next.
            encoded = [encoder([part]) for part in parts]
            assert [i for one in encoded for i in one.tokens] == [7, *whole, 1]
            assert [x for one in encoded for x in one.last] == [*[False] * (len(parts) - 1), True]
            assert sum(sum(one.text_bytes) for one in encoded) == len(text.encode())
            compared += 1
    assert compared == 18


def test_a_text_that_cannot_be_divided_is_refused(sources):
    """Of a long run, each part would begin to pair its characters somewhere else."""
    text_of = text_tokenizer(wrapped(byte_level(sources)))
    parts = list(parts_of(" " * 3000, "a.txt", 700, 128))
    with pytest.raises(UserError, match=r"a\.txt is too long to tokenize at once"):
        list(map(text_of.part_ids, parts))


def first_sequence(prefix):
    data = IndexedDataset(str(prefix))  # what it returns points into its memory
    return data[0].copy()


def test_what_a_file_holds_beside_the_tokenizer_is_not_applied(tmp_path, folder, tokenizer):
    state = json.loads((folder / "tokenizer.json").read_text())
    backend = Tokenizer.from_str(json.dumps(state))
    backend.enable_truncation(16)
    backend.enable_padding(length=3000, pad_token="<|pad|>", pad_id=2)
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 1)]
    )
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    state = json.loads(backend.to_str())
    state["model"]["dropout"] = 0.9
    for token in state["added_tokens"]:
        token["special"] = False
    (foreign / "tokenizer.json").write_text(json.dumps(state))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"split_special_tokens": False, "model_max_length": 16}
    (foreign / "tokenizer_config.json").write_text(json.dumps(config))

    text = "for a in range(7):\n    print(a, 'spelled <|endoftext|>')\n" * 40
    (tmp_path / "a.txt").write_text(text)
    for name, where in (("own", folder), ("other", foreign)):
        report = preprocess(Corpus([tmp_path / "a.txt"]), tmp_path / name, where, workers=1)
        ids = first_sequence(tmp_path / name)
        assert ids.tolist() == [*tokenizer.encode(text, split_special_tokens=True), 1]
        assert report.tokens == len(ids) > 1000
    other = load_tokenizer(foreign)
    assert leading_ids(other) == []
    (sample,) = text_samples(
        Reader(other), [str(tmp_path / "a.txt")], seq_length=500, max_samples=1
    )
    assert list(sample.tokens) == ids[:500].tolist()


def test_special_tokens_that_a_text_spells_are_text(made):
    tokenizer = wrapped(made)
    end, unknown = tokenizer.eos_token_id, tokenizer.unk_token_id
    spelled = "a <|endoftext|> b"
    assert text_tokenizer(tokenizer, parse_special_tokens=True).ids(spelled).count(end) == 1
    plain = text_tokenizer(tokenizer)
    assert unknown is not None
    if isinstance(made.model, models.Unigram):  # it finds the piece, whatever it is asked
        with pytest.raises(UserError, match=r"a\.txt contains <\|endoftext\|>, which this tok"):
            plain.ids(spelled, "a.txt")
        assert plain.ids("a < b")
    else:
        assert end not in plain.ids(spelled)
        assert len(plain.ids(spelled)) > 3


def test_one_rule_for_data_and_analyses(tmp_path, folder, tokenizer):
    text = "one <|endoftext|> two <|pad|>"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "x"}))
    for parse, count in ((False, 0), (True, 1)):
        prefix = tmp_path / str(parse)
        preprocess(
            Corpus([tmp_path / "a.jsonl"]), prefix, folder, workers=1, parse_special_tokens=parse
        )
        ids = first_sequence(prefix)
        assert ids[:-1].tolist().count(1) == count
        assert json.loads(Path(f"{prefix}.json").read_text())["parse_special_tokens"] is parse
        reader = Reader(tokenizer, parse_special_tokens=parse)
        sample = text_samples(reader, [str(tmp_path / "a.jsonl")], seq_length=99, max_samples=2)[0]
        assert list(sample.tokens) == ids[:-1].tolist()


def test_a_tokenizer_without_a_fast_form_follows_the_rule():
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    assert not slow.is_fast
    end = slow.eos_token_id
    assert end not in text_tokenizer(slow).ids("a</s>b")
    assert text_tokenizer(slow, parse_special_tokens=True).ids("a</s>b").count(end) == 1


def test_a_tokenizer_of_proteins_has_leading_ids():
    tokenizer = Tokenizer(models.BPE({"M": 0, "K": 1, "<s>": 2}, []))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    assert leading_ids(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")) == [2]


def test_readers_agree_that_a_byte_order_mark_is_no_text(tmp_path, texts):
    """As the first character of a document only."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = "\ufefféin Text,\ufeff langer als so"
    line = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.txt.zst").write_bytes(pa.compress(text.encode(), "zstd", asbytes=True))
    (tmp_path / "d.jsonl").write_text("\ufeff" + line)
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(("\ufeff" + line).encode()))
    (tmp_path / "f.jsonl.zst").write_bytes(pa.compress(line.encode(), "zstd", asbytes=True))
    (tmp_path / "g.json").write_text(json.dumps({"text": text}))
    pq.write_table(pa.table({"text": [text]}), tmp_path / "h.parquet")
    assert texts(tmp_path) == [text[1:]] * 8
    (tmp_path / "only.txt").write_text("\ufeff")
    assert len(texts(tmp_path)) == 8


@pytest.mark.parametrize("command", ["data", "analyze", "sweep", "ablate", "evaluate", "generate"])
def test_every_command_with_texts_has_the_flag(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help-all"])
    assert "--parse-special-tokens" in capsys.readouterr().out


def test_texts_become_tokens_in_one_place():
    """What else encodes: what surrounds a text, conversations, and comparisons of a tokenizer."""
    calls = re.compile(r"\.encode\([^)]*(add|split)_special_tokens|backend_tokenizer|encode_batch")
    package = Path(cli.__file__).parents[1]
    found = {
        p.relative_to(package).as_posix()
        for p in package.rglob("*.py")
        if calls.search(p.read_text())
    }
    assert found == {
        "data/text_tokenizer.py",
        "data/hf_tokenizer.py",
        "data/token_bytes.py",
        "convert/verify_logits.py",
        "finetune/chats.py",
    }


def test_a_text_without_utf8_is_refused_by_its_source():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(UserError, match="text 7 is not Unicode text: it has lone surrogates"):
        text_tokenizer(tokenizer).ids("caf\ud800", "text 7")
