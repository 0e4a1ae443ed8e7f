"""Tasks for the server: a command line as a rank parses it."""

import os
from typing import Any

from megasink.errors import ConfigError
from megasink.training import parse_arguments
from megasink.upstream import fused_kernels


def parsed(flags: list[str]) -> dict[str, Any]:
    """The problems, or the arguments that depend on packages and the line that names them."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    try:
        args, _ = parse_arguments.parse([*flags, "--train-iters", "3"])
    except ConfigError as error:
        return {"problems": error.problems}
    names = [default.name for default in fused_kernels.DEFAULTS]
    return {"args": {name: getattr(args, name) for name in names}, "line": fused_kernels.describe()}
