"""``python sharded.py ARGUMENTS``: megasink where accelerate takes processes on a CPU for GPUs.

It ignores FSDP on a CPU (accelerate/state.py, 1.15.0: only MULTI_GPU and the like become FSDP).
"""

import sys
from typing import Any
from unittest import mock

from accelerate.state import DistributedType, PartialState

from megasink.cli import main

_init = PartialState.__init__


def _started(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


mock.patch.object(PartialState, "__init__", _started).start()
sys.exit(main(sys.argv[1:]))
