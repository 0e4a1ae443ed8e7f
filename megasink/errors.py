"""The errors a user can cause. The command line prints them as one line and exits with 2."""

from collections.abc import Iterable


class UserError(Exception):
    """Something in the input is wrong: the message says what, its value, and what to do."""


class RankError(UserError):
    """Of one rank's own part of the work: whichever rank meets it says it."""


class ConfigError(UserError):
    """One or more problems of a configuration, all of them in one message.

    Args:
        problems: one sentence each, naming the value and the flag to change.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        count = len(self.problems)
        if count == 1:
            text = self.problems[0]
        else:
            lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1))
            text = f"{count} problems in the configuration:\n{lines}"
        super().__init__(text)
