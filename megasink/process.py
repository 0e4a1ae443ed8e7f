"""The first thing that a process does which will use Megatron: choose its platform."""

import os
import warnings
from collections.abc import Sequence

from megasink import platform
from megasink.upstream.mends import mend_upstream
from megasink.upstream.versions import check_versions


def prepare_process(argv: Sequence[str]) -> None:
    """Choose the platform and make Megatron importable. The first thing a rank does.

    Raises:
        UserError: versions that do not fit.
    """
    if "--cpu" in argv:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    check_versions()
    # A dozen modules of Megatron say so while they are imported.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*not installed")
    if not platform.cuda_present():
        platform.activate()
    mend_upstream()
