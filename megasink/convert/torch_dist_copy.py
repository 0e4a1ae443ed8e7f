"""A checkpoint of the old format as one that loads: for verification, which runs the model."""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megasink.checkpoint.find import Checkpoint
from megasink.checkpoint.legacy import is_legacy
from megasink.convert.architecture import Architecture
from megasink.convert.from_hf import head_counter
from megasink.convert.megatron_reader import MegatronCheckpoint
from megasink.convert.megatron_weights import leading_axes
from megasink.convert.table import LAYERS, NORM_BEFORE_EXPERTS, NORM_OF_LOCAL_SPEC
from megasink.convert.torch_dist_writer import TorchDistWriter


@contextlib.contextmanager
def loadable(found: Checkpoint, model: Architecture, beside: Path) -> Iterator[Checkpoint]:
    """The checkpoint itself, or while the body runs a torch_dist copy of its weights.

    Args:
        beside: a folder on the disk that has room for them.
    """
    if not is_legacy(found.folder):
        yield found
        return
    folder = Path(tempfile.mkdtemp(prefix=".loadable-", dir=beside.parent))
    try:
        _rewrite(MegatronCheckpoint(found.folder), model, folder)
        yield found._replace(folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rewrite(checkpoint: MegatronCheckpoint, model: Architecture, folder: Path) -> None:
    with TorchDistWriter(folder) as writer:
        for key, shape in checkpoint.shapes.items():
            leading = leading_axes(key)
            for index in itertools.product(*map(range, shape[:leading])):
                tensor = checkpoint.read(key, index)
                names = (key, NORM_OF_LOCAL_SPEC) if key == NORM_BEFORE_EXPERTS else (key,)
                for name in names:
                    writer.write(name, tensor, index, shape[:leading])
        for layer in range(model.layers):
            for name, tensor in head_counter(model).items():
                writer.write(LAYERS + name, tensor, (layer,), (model.layers,))
        writer.finish({})
