"""Tasks for the workers: what a rank of the trainer prints, and its patterns."""

import contextlib
import io
import logging
import warnings
from argparse import Namespace
from typing import Any

from tests.distributed.launch_task import train


def printed(flags: list[str], ranks: int, port: int) -> dict[str, Any]:
    """Train as one of `ranks` ranks: the text, and the sentences that announce a deprecation."""
    said: list[str] = []

    class Kept(logging.Handler):
        """Keeps messages that Megatron may not show on this rank's terminal."""

        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Kept()
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.redirect_stdout(io.StringIO()) as text:
                train(flags, ranks, port)
    finally:
        logging.getLogger().removeHandler(handler)
    said += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    said += text.getvalue().splitlines()
    found = {line for line in said if "deprecat" in line.lower()}
    return {"text": text.getvalue(), "deprecations": sorted(found)}


def pattern(**options: Any) -> str:
    """The pattern of a tiny GPT model."""
    from megasink.megatron.model_of_arguments import pattern_of_blocks
    from tests.distributed import tiny_gpt

    return pattern_of_blocks(tiny_gpt.model_config(gpt=True, **options).transformer)


def by_block(pattern: str, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags with an entry for each block, of those with one for each layer of a pattern."""
    from megasink.megatron.model_of_arguments import _by_block

    return vars(_by_block(Namespace(**flags), pattern))
