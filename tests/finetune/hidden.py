"""``python hidden.py ARGUMENTS``: megasink where Megatron cannot be imported."""

import sys

sys.modules["megatron"] = None  # type: ignore[assignment]

from megasink.cli import main  # noqa: E402

code = main(sys.argv[1:])
assert not any(name.startswith("megatron.") for name in sys.modules)
sys.exit(code)
