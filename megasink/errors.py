"""Errors a user can cause. The command line prints one line and exits with code 2."""

import difflib
import signal
from collections.abc import Iterable, Sequence

from megasink.console.printable import one_line


class UserError(ValueError):
    """An input error: the message states the problem, the value and the fix.

    The public API raises it, or a subclass, for any wrong input. Names in the message may come from
    untrusted input, so terminal control characters are escaped.
    """

    def __init__(self, message: object = ""):
        super().__init__(one_line(str(message)))


class ConfigError(UserError):
    """One or more problems in a single message: a sentence each, with the value and the flag."""

    def __init__(self, problems: str | Iterable[str]):
        given = [problems] if isinstance(problems, str) else problems
        self.problems = [one_line(problem) for problem in given]
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1))
            super().__init__(f"{len(self.problems)} problems in the configuration:\n{lines}")


class UnknownName(UserError, AttributeError, KeyError):
    """An object has no attribute or item of this name; hasattr and mappings expect these errors."""

    __str__ = Exception.__str__  # KeyError's own has quotation marks


class Signalled(KeyboardInterrupt):
    """Raised in the main thread by a signal; no ``except Exception`` takes it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.kept = ""  # follows "stopped by SIGTERM", set by what keeps something


class Stopped(UserError):
    """Raised when a signal stops the run; the text follows "stopped by SIGTERM"."""

    def __init__(self, number: int, text: str):
        super().__init__(f"stopped by {signal.Signals(number).name}{text}")
        self.exit_code = self.code_of(number)

    @staticmethod
    def code_of(number: int) -> int:
        """Return the shell exit code for a signal: 130 after Ctrl-C."""
        return 128 + number


def listed(texts: Sequence[str], most: int) -> str:
    """Join the first `most` texts, and say how many more there are."""
    more = f" (and {len(texts) - most} more)" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def reason_of(error: BaseException) -> str:
    """Return another package's error in one line, without torch's advice to load any pickle."""
    text = " ".join(str(error).split())
    if "weights_only" in text or "Weights only load failed" in text:
        return "it is not loaded: it contains objects other than tensors, which could run code"
    return text or type(error).__name__


def nearest(word: object, names: Iterable[str], *, cutoff: float = 0.75) -> str | None:
    """Return the known name closest to a misspelled one, or None below the similarity `cutoff`."""
    word = str(word)
    bare = word.lstrip("-–—")
    plain = ("--" if bare != word else "") + bare.partition("=")[0].replace("_", "-").lower()
    close = difflib.get_close_matches(plain, list(names), n=1, cutoff=cutoff)
    return close[0] if close else None


def unknown_name(what: str, value: object, names: Iterable[str]) -> str:
    """Return the error message for a value that is not one of `names`."""
    names = list(names)
    meant = nearest(value, names)
    hint = f" (did you mean {meant}?)" if meant else ""
    return f"{what} {value!r} is unknown: choose {', '.join(names)}{hint}"
