"""One long text becomes documents of whole paragraphs, some of which validation can have."""

import json
import random

from megatron.core.datasets.indexed_dataset import IndexedDataset

from megasink import cli
from megasink.data.corpus import Corpus, paragraphs
from megasink.data.hf_tokenizer import load_tokenizer

BREAKS = ("word ", "x" * 50, "\n", "\n\n", " \n \t\n", "\r\n\r\n")


def words_of(number):
    return random.Random(number).choice(cli.__doc__.split())


def words(texts):
    return "".join("".join(texts).split())


def test_no_word_is_lost():
    chance = random.Random(0)
    for _ in range(100):
        text = "".join(chance.choices(BREAKS, k=chance.randrange(1, 3000)))
        assert words(document for document, _ in paragraphs(text)) == words([text])


def test_a_document_ends_at_a_blank_line_or_else_at_the_end_of_a_line():
    text = "".join(f"paragraph {i} of some words\nand a line\n\n" for i in range(2000))
    found = [document for document, _ in paragraphs(text)]
    assert 150 < len(found) <= 200
    assert all(
        document.startswith("paragraph ") and document.endswith("line") for document in found
    )
    lines = "a line of a text without paragraphs\n" * 2000
    found = [document for document, _ in paragraphs(lines)]
    assert len(found) > 10
    assert set("\n".join(found).split("\n")) == {"a line of a text without paragraphs"}
    endless = "word " * 20_000
    assert [document for document, _ in paragraphs(endless)] == [endless]


def test_a_split_file_goes_on_from_its_middle(tmp_path):
    text = "".join(f"paragraph {i}\n\n" for i in range(20_000))
    path = tmp_path / "long.txt"
    path.write_text(text)
    corpus = Corpus([path], split="auto")
    found = [document.text for document in corpus]
    assert found == [document for document, _ in paragraphs(text)]
    documents = iter(corpus)
    for _ in range(7):
        next(documents)
    corpus.start = corpus.place
    assert [document.text for document in corpus] == found[7:]


def test_a_single_text_is_split_and_others_are_not(tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    book = "".join(f"Paragraph {i} has words,\nand more: {words_of(i)}.\n\n" for i in range(400))
    (texts / "book.txt").write_text(book)
    common = ["--train-tokenizer", "330", "--workers", "1"]
    data = ["data", str(texts), "--output"]
    assert cli.main([*data, str(tmp_path / "one"), *common]) == 0
    said = capsys.readouterr().out
    documents = IndexedDataset(str(tmp_path / "one"))
    assert 20 < len(documents) < 40
    assert f"text is split at blank lines, into {len(documents)} documents (--split-docu" in said
    tokenizer = load_tokenizer(tmp_path / "one-tokenizer")
    texts_back = [tokenizer.decode(document[:-1]) for document in documents]
    assert all(text.startswith("Paragraph") and text.endswith(".") for text in texts_back)
    assert json.loads((tmp_path / "one.json").read_text())["split_documents"] is True
    for name, flags, others in (
        ("whole", ["--split-documents", "never"], 1),
        ("two", [], 2),
        ("both", ["--split-documents", "paragraphs"], len(documents) + 1),
    ):
        if name == "two":
            (texts / "note.txt").write_text("A note.\n\nOf two paragraphs.\n")
        tokenizer = ["--tokenizer", str(tmp_path / "one-tokenizer"), "--workers", "1"]
        assert cli.main([*data, str(tmp_path / name), *tokenizer, *flags]) == 0
        assert len(IndexedDataset(str(tmp_path / name))) == others
        assert ("split at blank lines" in capsys.readouterr().out) == (name == "both")
