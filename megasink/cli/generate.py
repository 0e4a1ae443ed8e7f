"""``megasink generate``: continue prompts with a trained model."""

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megasink.checkpoints.find import find_checkpoint
from megasink.checkpoints.run_tokenizer import tokenizer_problem
from megasink.checkpoints.saved_arguments import read_arguments
from megasink.cli.device_flag import add_device, device_problems
from megasink.console.printable import printable
from megasink.cpu.prepare_process import prepare_quietly
from megasink.data.hf_tokenizer import leading_ids
from megasink.data.input_files import BYTE_ORDER_MARK
from megasink.data.text_tokenizer import add_parse_special_tokens, text_tokenizer
from megasink.errors import ConfigError, UserError
from megasink.options.command_parser import CommandParser
from megasink.plugins import add_flag

_NEW_TOKENS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Print each prompt with its continuation, token by token on a terminal.

    The model may have been trained under any parallel layout: it is loaded whole into this process,
    on the GPU if there is one. Several prompts run as one batch. Speed is printed to stderr.
    """
    parser = CommandParser(prog="megasink generate", description=main.__doc__)
    add_flag(parser)
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run folder, or a checkpoint folder in it"
    )
    parser.add_argument("--prompt", action="append", required=True, help="text; may be repeated")
    text = f"tokens to add to each prompt; default: {_NEW_TOKENS}, or as many as fit"
    parser.add_argument("--max-new-tokens", type=int, help=text)
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0: always the most likely token; default: 1"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from the k most likely tokens; default: all"
    )
    text = "sample from the most likely tokens that together reach this probability; default: 1"
    parser.add_argument("--top-p", type=float, default=1.0, help=text)
    parser.add_argument(
        "--seed", type=int, default=1234, help="random seed of the samples; default: 1234"
    )
    parser.add_argument("--iteration", type=int, help="checkpoint to load; default: the newest")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder; default: the run's")
    add_parse_special_tokens(parser)
    add_device(parser)
    args = parser.first_screen(
        "megasink generate runs/mine --prompt 'Once upon a time' --temperature 0"
    ).parse_args(argv)
    _check(args)
    checkpoint = find_checkpoint(args.run, args.iteration)  # before the slow imports
    read_arguments(checkpoint.config)
    prepare_quietly(cpu=args.device == "cpu")
    from megasink.checkpoints.load import load_model, single_process
    from megasink.megatron.decoding import generate
    from megasink.megatron.sampling import Sampling

    with single_process():
        loaded = load_model(args.run, args.iteration, args.tokenizer)
        model, tokenizer, trained, iteration, generation = loaded
        ends = generation["eos_token_id"]
        encoder = text_tokenizer(tokenizer, parse_special_tokens=args.parse_special_tokens)
        given = [prompt.removeprefix(BYTE_ORDER_MARK) for prompt in args.prompt]
        prompts = [encoder.ids(prompt, "a --prompt") for prompt in given]
        # Every training sequence starts with it (P2.23).
        first = [trained.sink_token_id] if trained.sink_token else []
        first += leading_ids(tokenizer)
        count = _new_tokens(prompts, args.max_new_tokens, trained, len(first))
        device = next(model.parameters()).device.type
        print(
            f"{args.run} at step {iteration}, {trained.attention_variant} attention, on {device}",
            file=sys.stderr,
            flush=True,
        )
        stream = len(prompts) == 1 and sys.stdout.isatty()
        shown = _Shown(tokenizer, prompts, ends, stream=stream)
        made = generate(
            model,
            [first + prompt for prompt in prompts],
            count,
            Sampling(args.temperature, args.top_k, args.top_p, args.seed),
            vocabulary=loaded.vocabulary,
            ends=ends,
            on_token=shown.add,
        )
        shown.finish()
    print(
        f"prefill: {made.prefill_tokens} tokens, "
        f"{made.prefill_tokens / made.prefill_seconds:,.0f} tokens/s; "
        f"decode: {made.decode_tokens} tokens, "
        f"{made.decode_tokens / made.decode_seconds:,.0f} tokens/s",
        file=sys.stderr,
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError with every problem that needs no model to find."""
    problems = device_problems(args.device)
    if not 0 <= args.temperature < float("inf"):
        problems.append(f"--temperature {args.temperature}: use 0 or more")
    if args.top_k < 0:
        problems.append(f"--top-k {args.top_k}: use 1 or more, or 0 for all tokens")
    if not 0 < args.top_p <= 1:
        problems.append(f"--top-p {args.top_p}: use more than 0, and at most 1")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        problems.append(f"--max-new-tokens {args.max_new_tokens}: use 1 or more")
    if not all(args.prompt):
        problems.append("--prompt is empty: give some text to continue")
    if args.tokenizer is not None and (problem := tokenizer_problem(args.tokenizer)):
        problems.append(f"--tokenizer {problem}")
    if problems:
        raise ConfigError(problems)


def _new_tokens(
    prompts: list[list[int]], asked: int | None, trained: argparse.Namespace, first: int
) -> int:
    """Return the number of tokens to add to each prompt, which has `first` tokens before it."""
    longest, shortest = max(map(len, prompts)), min(map(len, prompts))
    positions = trained.max_position_embeddings - first
    if not all(prompts):
        raise UserError("a --prompt has no tokens: pass some text")
    if shortest < trained.prefix_lm_tokens:
        raise UserError(
            f"a prompt of {shortest} tokens is shorter than the prefix of the model "
            f"(--prefix-lm-tokens {trained.prefix_lm_tokens}): give a longer one"
        )
    if longest >= positions:
        raise UserError(
            f"a prompt of {longest} tokens leaves no room in the {positions} positions of the "
            "model (--max-position-embeddings): shorten it"
        )
    if asked is not None and longest + asked > positions:
        raise UserError(
            f"--max-new-tokens {asked} after a prompt of {longest} tokens exceeds the {positions} "
            f"positions of the model: use at most {positions - longest}"
        )
    return min(_NEW_TOKENS, positions - longest) if asked is None else asked


class _Shown:
    """The texts, growing token by token; `stream` shows the first one while it grows."""

    def __init__(
        self, tokenizer: Any, prompts: list[list[int]], ends: Collection[int], *, stream: bool
    ):
        self.tokenizer, self.ends = tokenizer, ends
        self.tokens = [list(prompt) for prompt in prompts]
        self.stream = stream
        self.shown = ""
        self._show(finished=False)

    def add(self, row: int, token: int) -> None:
        if token not in self.ends:
            self.tokens[row].append(token)
            self._show(finished=False)

    def finish(self) -> None:
        """Show the rest of the texts."""
        if self.stream:
            self._show(finished=True)
            print(flush=True)
            return
        texts = "\n---\n".join(self._text(row) for row in range(len(self.tokens)))
        print(printable(texts) if sys.stdout.isatty() else texts, flush=True)

    def _text(self, row: int) -> str:
        text: str = self.tokenizer.decode(self.tokens[row], skip_special_tokens=False)
        return text

    def _show(self, *, finished: bool) -> None:
        if not self.stream:
            return
        text = self._text(0)
        # Incomplete characters decode to U+FFFD.
        ready = text if finished else text.rstrip("\N{REPLACEMENT CHARACTER}")
        print(printable(ready[len(self.shown) :]), end="", flush=True)
        self.shown = ready
