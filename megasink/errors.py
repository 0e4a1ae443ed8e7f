"""The errors a user can cause. The command line prints them as one line and exits with 2."""

import signal
from collections.abc import Iterable

from megasink.printable import one_line


class UserError(Exception):
    """Something in the input is wrong: the message says what, its value, and what to do.

    Names in it may come from anywhere: what a terminal would obey is escaped here, for all.
    """

    def __init__(self, message: object = ""):
        super().__init__(one_line(str(message)))


class ConfigError(UserError):
    """One or more problems of a configuration, all of them in one message.

    Args:
        problems: one sentence each, naming the value and the flag to change.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = [one_line(problem) for problem in problems]
        count = len(self.problems)
        if count == 1:
            text = self.problems[0]
        else:
            lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1))
            text = f"{count} problems in the configuration:\n{lines}"
        super().__init__(text)


class Stopped(UserError):
    """A signal ended the work; the message says what is left of it.

    Args:
        number: of the signal.
        text: what follows "stopped by SIGTERM", with its own separator.
    """

    def __init__(self, number: int, text: str):
        super().__init__(f"stopped by {signal.Signals(number).name}{text}")
        self.exit_code = self.code_of(number)

    @staticmethod
    def code_of(number: int) -> int:
        """The exit code of what a signal ended, as shells count: 130 after Ctrl-C."""
        return 128 + number
