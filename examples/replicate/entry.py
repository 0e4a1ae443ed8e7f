"""How a program of this folder ends."""

import sys
from collections.abc import Callable
from typing import NoReturn

from megasink.console import signals
from megasink.errors import UserError


def end_with(main: Callable[[], int], program: str) -> NoReturn:
    """Run a main and end the process; a user's error is one line, and a non-zero exit code.

    So is a signal, behind which the main has unwound (`megasink.console.signals`).
    """

    def answered() -> int:
        try:
            return main()
        except UserError as error:
            print(f"{program}: error: {error}", file=sys.stderr)
            return getattr(error, "exit_code", 2)
        except OSError as error:
            if error.filename is None:
                raise
            print(f"{program}: error: {error.filename}: {error.strerror}", file=sys.stderr)
            return 2

    sys.exit(signals.run(answered))
