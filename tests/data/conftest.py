"""A small tokenizer and its text, made once."""

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from megasink.data.corpus import Corpus, Document
from megasink.data.hf_tokenizer import chunked, load_tokenizer, to_tokenizers, train_sentencepiece
from megasink.data.hf_tokenizer import train_tokenizer as train

STDLIB = Path(sysconfig.get_path("stdlib"))
SOURCES = ["argparse.py", "ast.py", "inspect.py", "statistics.py", "typing.py"]


@pytest.fixture(scope="session")
def sources() -> list[str]:
    """The text of a few modules of the standard library, about 500 kB."""
    return [(STDLIB / name).read_text(encoding="utf-8") for name in SOURCES]


@pytest.fixture(scope="session")
def folder(sources, tmp_path_factory) -> Path:
    """A trained tokenizer folder of 1024 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train([Document(text, "test") for text in sources], 1024, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def twins(sources) -> SimpleNamespace:
    """A sentencepiece model (`sp`) and what is made of it for `tokenizers` (`hf`)."""
    import sentencepiece

    model = train_sentencepiece([c for s in sources for c in chunked(s)], 2048)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    return SimpleNamespace(sp=sp, hf=to_tokenizers(model))


@pytest.fixture
def texts():
    """A function that gives the texts of a corpus of `inputs`."""

    def read(*inputs, **options) -> list[str]:
        return [d.text for d in Corpus(inputs, **options)]

    return read
