"""Which rank reports an error that every rank meets."""

import pytest

from tests.distributed.pool import free_port
from tests.forkserver import server

# Rank 0 may be slower to meet the error than the others.
RANKS = """
import os, sys, time
from unittest import mock
from megasink.errors import UserError
from megasink.training import exit_reasons, pretrain
rank = os.environ["RANK"]
def fail(argv, **_):
    time.sleep(2.0 if rank == "0" else 0.0)
    if rank in sys.argv[1]:
        raise UserError("the data is one document")
    time.sleep(600.0)
wait = exit_reasons.wait_for_first
pretrain.pretrain = fail
seconds = 0.5 if sys.argv[1] == "1" else 600.0  # it is ended by torchrun
with mock.patch.object(pretrain, "wait_for_first", lambda: wait(seconds)):
    pretrain.main([])
"""


@pytest.mark.parametrize("failing", ["01", "1"])
def test_an_error_is_reported_whichever_rank_is_first(failing, tmp_path):
    """Both ranks meet it, the second one earlier; or only the second one does."""
    entry = tmp_path / "entry.py"
    entry.write_text(RANKS)
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    result = server().run([*torchrun, str(entry), failing], tree=True)
    assert result.returncode == 1
    assert result.stderr.count("megasink: error: the data is one document") == 1, result.stderr
