"""What chat data cost: CPU time of tokenizing next to text, and how full packed samples are.

    python benchmarks/chat_data.py

The same text is encoded as plain documents and as conversations, with and without generation
markers, in turn, in this process; the figures are medians of the repeats.
"""

import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from megasink.data.bins import best_fit
from megasink.data.chat import chat_settings
from megasink.data.corpus import Document
from megasink.data.encode import EncoderSettings
from megasink.data.tokenizer import load_tokenizer, train_tokenizer
from tests.chats import MARKED, UNMARKED, chat_tokenizer

REPEATS = 5
CONVERSATIONS = 400
TURNS, CHARACTERS = 4, 600  # a turn each of user and assistant: (questions are a fifth)
CONTEXT = 4096


def conversations() -> list[list[dict[str, str]]]:
    """Questions and answers of the standard library's text."""
    names = ("argparse", "ast", "inspect", "typing", "statistics", "tarfile", "turtle", "doctest")
    paths = (Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in names)
    text = "".join(path.read_text() for path in paths)
    place, chats = 0, []
    for _ in range(CONVERSATIONS):
        chat = []
        for turn in range(2 * TURNS):
            size = CHARACTERS if turn % 2 else CHARACTERS // 5
            place = place if place + size < len(text) else 0
            role = "assistant" if turn % 2 else "user"
            chat.append({"role": role, "content": text[place : place + size]})
            place += size
        chats.append(chat)
    return chats


def speeds(folder: Path) -> None:
    """Print the MB of text per second of CPU time, of each way to encode it."""
    chats = conversations()
    texts = [Document(m["content"], "") for chat in chats for m in chat]
    train_tokenizer(texts, 2048, folder / "plain")
    ways: dict[str, Callable[[], Any]] = {}
    for name, template in (("markers", MARKED), ("no markers", UNMARKED)):
        tokenizer = load_tokenizer(chat_tokenizer(folder / "plain", folder / name, template))
        encoder = chat_settings(tokenizer, "uint16", "messages", 1 << 20).encoder()
        records = [(json.dumps({"messages": chat}), "") for chat in chats]
        ways[name] = lambda encoder=encoder, records=records: encoder(records)
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    plain = EncoderSettings(tokenizer.backend_tokenizer.to_str(), [], [1], "uint16").encoder()
    ways["text"] = lambda: plain(rendered)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, encode in ways.items():
            start = time.process_time()
            encode()
            seconds[name].append(time.process_time() - start)
    size = sum(len(text.encode()) for text in rendered) / 1e6
    for name, taken in seconds.items():
        print(f"{name}: {size / statistics.median(taken):.2f} MB per second of CPU time")


def packing() -> None:
    """Print how full samples are, packed by length and in the order of the data."""
    draw = np.random.default_rng(0)
    for median in (200, 600, 1500):
        lengths = np.clip(draw.lognormal(np.log(median), 0.9, 100_000), 8, CONTEXT).astype(int)
        start = time.process_time()
        bins = best_fit(lengths, CONTEXT)
        seconds = time.process_time() - start
        in_order, room = 0, 0
        for length in lengths.tolist():
            if length > room:
                in_order, room = in_order + 1, CONTEXT
            room -= length
        full = [lengths.sum() / (count * CONTEXT) for count in (len(bins), in_order, len(lengths))]
        print(
            f"median {median}: {full[0]:.2%} full; in order {full[1]:.2%}, one per sample "
            f"{full[2]:.2%}; packed in {seconds:.2f} s of CPU time"
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        speeds(Path(folder))
    packing()
