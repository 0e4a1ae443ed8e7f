"""Read a tokenizer in a short-lived process, because transformers takes much memory.

Importing it takes 0.58 GB with torch and 0.08 GB without. Tokenizers do not need torch, but other
parts of this process may, and transformers decides at its import whether torch is available.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from megasink.console.stopping import starting_processes
from megasink.data.encode import follow_parent
from megasink.data.tokenizer import load_tokenizer
from megasink.errors import UserError


def from_tokenizer[Result](
    folder: Path, function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """Return ``function(tokenizer, *args, **kwargs)`` for the tokenizer of `load_tokenizer`.

    In this process if it has imported transformers already, or cannot start another.
    """
    if "transformers" in sys.modules:
        return function(load_tokenizer(folder), *args, **kwargs)
    for torch in (False, True):
        pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_start, initargs=(torch,)
        )
        with pool:
            try:
                with starting_processes():
                    called = pool.submit(_call, folder, function, args, kwargs)
                return called.result()
            except BrokenProcessPool:
                break  # a script without a __main__ guard, or too little memory
            except UserError:
                # transformers may need torch for this one, or explain the reason better with it.
                if torch:
                    raise
    return function(load_tokenizer(folder), *args, **kwargs)


def _start(torch: bool) -> None:
    follow_parent()
    if not torch:
        # Python's mark for a module that cannot be imported.
        sys.modules["torch"] = None  # type: ignore[assignment]
        # Otherwise transformers advises to install it.
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def _call(folder: Path, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(load_tokenizer(folder), *args, **kwargs)
