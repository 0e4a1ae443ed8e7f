"""Entry point of ``megasink`` and ``python -m megasink``, also under torchrun."""

import sys

from megasink.console import signals


def run() -> int:
    """Run the command line; a signal during its imports ends it with one line."""

    def command() -> int:
        from megasink.cli import main

        return main()

    return signals.run(command)


if __name__ == "__main__":
    sys.exit(run())
