"""Checkpoints of Megatron's old format: the bytes of a torch_dist export, and no code of a pickle.

Of tensor and pipeline parallelism at once: test_round_trip.py. Not covered: virtual pipeline
stages, grouped experts of TransformerEngine, expert tensor parallelism of its own.
"""

import json
import os
import shutil
from argparse import Namespace

import pytest
import torch

from megasink.checkpoint.legacy import FILE
from megasink.checkpoint.saved_arguments import read_arguments
from megasink.convert import to_hf
from megasink.convert.legacy_weights import legacy_weights
from megasink.errors import UserError
from tests.distributed.layout import SINGLE
from tests.runs import MOCK, TINY, UNTIED

FLAGS = [*TINY, *UNTIED, *MOCK]
FLAGS += """
    --hidden-size 48 --group-query-attention --num-query-groups 2 --kv-channels 16
    --ffn-hidden-size 40 --max-position-embeddings 96 --micro-batch-size 1 --train-iters 3
    --lr 1e-1 --bf16 --vocab-size 100 --save-interval 100 --num-workers 0 --log-interval 100
    --attention-variant gated --gate-granularity headwise --qk-layernorm --num-experts 4
    --moe-router-topk 2 --moe-ffn-hidden-size 24 --expert-model-parallel-size 2
""".split()


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """Runs of the same training, with experts on two ranks, in both formats."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("torch", "torch_dist"):
        where = ["--run-dir", str(folder / name), "--ckpt-format", name]
        pool.train([*FLAGS, *where], 2)
    return folder / "torch", folder / "torch_dist"


def files_of(folder):
    return sorted((folder / "checkpoints" / "iter_0000003").glob(f"*/{FILE}"))


def test_experts_and_gates_give_the_bytes_of_the_other_format(runs, tmp_path):
    contents = []
    for run in runs:
        output = tmp_path / run.name
        to_hf.export(to_hf.source_of(run), output, say=lambda line: None)
        contents.append((output / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]
    assert b"mlp.experts.3.gate_proj" in contents[0]


def test_it_is_verified_as_any_other(pool, runs, tmp_path):
    command = ["convert-to-hf", str(runs[0]), str(tmp_path / "hf"), "--cpu"]
    ((answer,),) = pool.run("tests.train.generate_tasks:megasink", SINGLE, commands=[command])
    code, said, _ = answer
    assert code == 0
    assert "float32: logits differ by at most" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.how = (function, arguments)

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize(
    ("function", "named"),
    [(os.system, "system"), (eval, "eval"), (torch.hub._check_module_exists, None)],
)
def test_a_pickle_runs_nothing(tmp_path, function, named):
    """The third is of a package whose classes are in honest checkpoints: nothing of it is called.

    It says whether a module can be found, and imports the parents of the one that it is asked for.
    """
    marker = tmp_path / "marker"
    if named is None:
        package = tmp_path / "imported_by_a_pickle"
        package.mkdir()
        (package / "__init__.py").write_text(f"open({str(marker)!r}, 'w')")
        argument = "imported_by_a_pickle.child"
    elif function is eval:
        argument = f"open({str(marker)!r}, 'w')"
    else:
        argument = f"touch {marker}"
    folder = tmp_path / "iter_0000003"
    path = folder / "mp_rank_00" / FILE
    path.parent.mkdir(parents=True)
    arguments = Namespace(num_attention_heads=4, harm=Runs(function, argument))
    torch.save({"args": arguments, "model": {"x": torch.ones(2)}}, path)
    if named is None:
        assert set(legacy_weights(folder)) == {"x"}  # an honest checkpoint otherwise
    else:
        with pytest.raises(UserError, match=f"untrusted: it names .*{named}"):
            legacy_weights(folder)
    assert not marker.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        torch.load(path, weights_only=False)
    assert marker.exists()  # it would have


def test_files_that_are_not_whole_are_said(runs, tmp_path):
    run = tmp_path / "run"

    def refused(*words):
        with pytest.raises(UserError) as caught:
            to_hf.export(to_hf.source_of(run), tmp_path / "hf")
        for word in words:
            assert word in str(caught.value)

    shutil.copytree(runs[0], run)
    _, second = files_of(run)
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    refused("mp_rank_00_001", "is broken")
    shutil.rmtree(second.parent)
    refused("is incomplete", "TP=1 x PP=1 x EP=2", "but only mp_rank_00_000")
    shutil.copytree(runs[0] / "checkpoints", run / "checkpoints", dirs_exist_ok=True)
    second.write_bytes(b"not a zip at all")
    refused("mp_rank_00_001", "not a zip")
    second.write_bytes(content)
    experts = legacy_weights(second.parents[1])[
        "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    ]
    stored = experts.parts[-1].find()
    with stored.path.open("r+b") as file:
        file.seek(stored.start)
        file.write(b"\xff")
    refused("linear_fc2", "checksum")
    second.write_bytes(content)
    config = run / "config.json"
    saved = read_arguments(config)
    config.write_text(json.dumps({"arguments": saved | {"num_layers": 1}}))
    refused("different model", "is [2, ", "not [1, ")
