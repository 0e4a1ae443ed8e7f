"""Train a byte-pair tokenizer as a Hugging Face folder, and load any such folder offline."""

import hashlib
import io
import json
import random
import re
import shutil
import string
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasink.errors import UserError
from megasink.files.atomic import atomic_folder, atomic_text
from megasink.files.system_errors import missing_folder, writing
from megasink.options.extras import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from megasink.data.corpus import Document

UNK, EOD, PAD = "<|unk|>", "<|endoftext|>", "<|pad|>"
"""Ids 0, 1 and 2. Padding has its own id, because other trainers exclude it from the loss."""

BOS = "<|bos|>"
"""Id 3, for tokenizers trained with a BOS, which they put before every text."""

MIN_VOCAB_SIZE = 320
"""256 bytes, 3 special tokens, and room for some characters and merges."""

_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",  # its name in transformers 4 and 5
    "clean_up_tokenization_spaces": False,  # transformers 4 eats spaces by default
    "unk_token": UNK,
    "eos_token": EOD,
    "pad_token": PAD,
}
_CHUNK = 4096  # characters per piece of the training sample
_MOST_IDS = 1 << 24
_FOLDER_FILES = {"tokenizer.json", "tokenizer_config.json"}
# sentencepiece drops a text with U+2585, its own mark, and reads U+2581 as a space; a NUL ends
# strings in C. No token is learned across them, and encoding spells them in bytes.
_UNLEARNABLE = re.compile("[\0\u2585\u2581]+")


@dataclass(frozen=True)
class TrainedTokenizer:
    """UTF-8 bytes of the corpus and of the sample that a tokenizer was trained on; wall time."""

    corpus_bytes: int
    sample_bytes: int
    seconds: float


def train_tokenizer(
    documents: "Iterable[Document]",
    vocab_size: int,
    folder: str | Path,
    *,
    sample_bytes: int = 32 << 20,
    seed: int = 0,
    bos: bool = False,
    overwrite: bool = False,
) -> TrainedTokenizer:
    """Train a byte-fallback BPE with sentencepiece and write it as a Hugging Face folder.

    decode(encode(x)) == x. Every digit is a token. `vocab_size` includes special tokens and bytes;
    `bos` adds BOS, id 3, before every text. The same documents and seed give the same files.
    """
    start = time.perf_counter()
    folder = Path(folder)
    if problem := folder_problem(folder, overwrite=overwrite):
        raise UserError(problem)
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"vocabulary size {vocab_size} is too small: use {MIN_VOCAB_SIZE} or more")
    corpus_bytes, chunks = _sample(documents, sample_bytes, random.Random(seed))
    tokenizer = to_tokenizers(train_sentencepiece(chunks, vocab_size, bos=bos))
    config = _CONFIG | ({"bos_token": BOS} if bos else {})
    with writing(f"tokenizer folder {folder}"), atomic_folder(folder.absolute()) as partial:
        atomic_text(partial / "tokenizer.json", tokenizer.to_str(pretty=True))
        atomic_text(partial / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
    sample = sum(len(chunk.encode()) for chunk in chunks)
    return TrainedTokenizer(corpus_bytes, sample, time.perf_counter() - start)


def folder_problem(folder: Path, *, overwrite: bool) -> str | None:
    """Return in one line why a tokenizer cannot be written to `folder`; None if it can."""
    if not folder.exists():
        return None
    if not overwrite:
        return f"{folder} exists: use it with --tokenizer, or pass --overwrite"
    if not folder.is_dir() or {p.name for p in folder.iterdir()} - _FOLDER_FILES:
        return (
            f"{folder} contains files other than a tokenizer, so it is not overwritten: choose "
            "another folder"
        )
    return None


def _sample(
    documents: "Iterable[Document]", budget: int, rng: random.Random
) -> tuple[int, list[str]]:
    """Return the corpus size in bytes, and a uniform reservoir sample of its chunks."""
    chunks: list[str] = []
    total = seen = kept = 0
    for document in documents:
        total += len(document.text.encode())
        for chunk in chunked(document.text):
            seen += 1
            size = len(chunk.encode())
            if kept + size <= budget:
                chunks.append(chunk)
                kept += size
            elif (slot := rng.randrange(seen)) < len(chunks):
                kept += size - len(chunks[slot].encode())
                chunks[slot] = chunk
    return total, chunks


def chunked(text: str) -> Iterator[str]:
    """Split `text` into lines of at most 4096 characters, without unlearnable characters."""
    for part in _UNLEARNABLE.split(text):
        start = 0
        while start < len(part):
            end = start + _CHUNK
            if end < len(part):
                # +1: the newline ends its chunk; 0 if there is none
                end = part.rfind("\n", start, end) + 1 or end
            yield part[start:end]
            start = end


def train_sentencepiece(chunks: list[str], vocab_size: int, *, bos: bool = False) -> bytes:
    """Train a sentencepiece BPE on `chunks` (see `chunked`); return the serialized model."""
    require("sentencepiece", "training a tokenizer")
    import sentencepiece

    from megasink.data.corpus import default_workers

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(chunks),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * _CHUNK + 4,
            num_threads=default_workers(),
            unk_id=0,
            unk_piece=UNK,
            eos_id=1,
            eos_piece=EOD,
            pad_id=2,
            pad_piece=PAD,
            bos_id=3 if bos else -1,
            bos_piece=BOS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"cannot train {vocab_size} tokens on this corpus, because {_limit(str(error))}"
        ) from error
    return model.getvalue()


def _limit(message: str) -> str:
    """Rephrase sentencepiece's error about a vocabulary size in terms of our options."""
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"its characters need a vocabulary size of at least {match[1]}: give that"
    if match := re.search(r"set it to a value <= (\d+)", message):
        return f"its words allow a vocabulary size of at most {match[1]}: give that, or more text"
    return message.strip()


def to_tokenizers(model: bytes) -> "Tokenizer":
    """Convert a model of `train_sentencepiece` to `tokenizers`: the same ids for every text."""
    # Its tokens hold real spaces for U+2581, which in a text is spelled in bytes and survives.
    import sentencepiece
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab: dict[str, int] = {}
    learned: dict[str, int] = {}
    for i in range(sp.get_piece_size()):
        piece = sp.id_to_piece(i)
        if sp.is_byte(i) or sp.is_control(i) or sp.is_unknown(i):
            vocab[piece] = i
        else:
            learned[piece.replace("\u2581", " ")] = i
    vocab |= learned
    # sentencepiece merges any neighbors whose union is a piece, lowest id first: every split of a
    # piece into two pieces is a merge with that piece's rank.
    merges = [
        (token[:k], token[k:])
        for token in sorted(learned, key=learned.__getitem__)
        for k in range(len(token) - 1, 0, -1)
        if token[:k] in learned and token[k:] in learned
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=UNK, byte_fallback=True))
    # A piece has a space only after other spaces, so no merge crosses this split: it changes no id,
    # and yields the words that `tokenizers` caches.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" +[^ ]*|[^ ]+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = [UNK, EOD, PAD, *([BOS] if sp.bos_id() >= 0 else [])]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    if BOS in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, sp.bos_id())]
        )
    return tokenizer


def load_tokenizer(folder: str | Path) -> Any:
    """Load a Hugging Face tokenizer folder with an EOS, offline and without running its code."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"tokenizer {missing_folder(folder)}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises nearly anything on a bad folder
        # The first line of huggingface_hub's validation names the field, the second what is wrong.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = " ".join(map(str.strip, lines[: 1 + lines[0].endswith(":")]))
        raise UserError(f"transformers cannot load the tokenizer in {folder}: {reason}") from error
    refuse_unusable(tokenizer, folder)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) has no fast version: save one "
            "with a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {folder} has no end-of-document token: set `eos_token` in its "
            "tokenizer_config.json"
        )
    return tokenizer


def refuse_unusable(tokenizer: Any, folder: str | Path) -> None:
    """Raise UserError for a tokenizer with only special tokens, or with impossible settings."""
    if (count := id_count(tokenizer)) > _MOST_IDS:
        raise UserError(
            f"the tokenizer in {folder} has the id {count - 1}, which is impossibly large: its "
            "tokenizer.json is damaged"
        )
    longest = getattr(tokenizer, "model_max_length", 0)
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise UserError(
            f"the tokenizer in {folder} has model_max_length {longest!r:.40}, which is not a number"
        )
    templates = getattr(tokenizer, "chat_template", None)
    names = templates if isinstance(templates, dict) else {}
    # They become file names when the tokenizer is saved.
    if strange := [name for name in names if not re.fullmatch(r"\w[\w.-]*", str(name))]:
        raise UserError(
            f"the tokenizer in {folder} has a chat template with the invalid name "
            f"{strange[0]!r:.80}: rename it"
        )
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    if set(tokenizer.get_vocab()) <= {token.content for token in added if token.special}:
        raise UserError(
            f"{folder} has no tokenizer files, such as tokenizer.json: add them, or pass the "
            "folder that has the model's tokenizer (--tokenizer)"
        )


def id_count(tokenizer: Any) -> int:
    """Return one more than a tokenizer's largest id; len() is less if ids are missing."""
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1


def leading_ids(tokenizer: Any) -> list[int]:
    """Return the ids that a tokenizer puts before any text by itself: BOS, or nothing."""
    for text in string.printable:  # a tokenizer of proteins may know few of them
        if bare := tokenizer.encode(text, add_special_tokens=False):
            full: list[int] = tokenizer.encode(text)
            return full[: full.index(bare[0])]
    raise UserError(f"the tokenizer {tokenizer.name_or_path} has no token for any ASCII character")


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 (hex) of the meaning of a tokenizer's ids: vocabulary and EOD token."""
    meaning = [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()
