"""`megasink adopt`: checkpoints of Megatron's own training loop become runs."""

import json
import random
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.distributed.layout import SINGLE
from tests.distributed.pool import Pool, free_port
from tests.forkserver import server
from tests.runs import steps

TASKS = "tests.checkpoints.stock_tasks"
MODEL = shlex.split("""
    --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 64
    --make-vocab-size-divisible-by 64 --mock-data --num-workers 0 --eval-iters 0
    --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --train-iters 4 --log-interval 1
    --attention-dropout 0 --hidden-dropout 0 --save-interval 2 --ckpt-format torch_dist
""")
GROUPS = ["--group-query-attention", "--num-query-groups", "2"]
CLASSES = {
    "gpt": ["--num-layers", "2", "--softmax-type", "learnable", *GROUPS],
    "hybrid": ["--hybrid-layer-pattern=-*-*", "--attention-output-gate", *GROUPS],
    "latent": shlex.split("""
        --num-layers 2 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 32 --qk-head-dim 24
        --qk-pos-emb-head-dim 16 --v-head-dim 16 --qk-layernorm --rotary-scaling-factor 40
        --mscale-all-dim 1 --yarn-beta-fast 2 --yarn-original-max-position-embeddings 8
    """),  # the last two are ignored
    "experts": shlex.split("""
        --num-layers 3 --num-experts 4 --moe-layer-freq ([0]+[1]*2) --moe-ffn-hidden-size 32
        --moe-router-topk 2 --moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type
        alltoall --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2
    """),
    "prediction": ["--num-layers", "2", "--mtp-num-layers", "1", *GROUPS],
}
LAYOUTS = {
    "one": [],
    "tp": "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 32".split(),
    "pp": ["--pipeline-model-parallel-size", "2"],
    "ep": ["--expert-model-parallel-size", "2"],
    "dp": ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"],
    "buckets": ["--use-distributed-optimizer"],
    "tp-ep": shlex.split("""
        --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2
        --expert-tensor-parallel-size 1 --make-vocab-size-divisible-by 32
    """),
}
OTHERS = ("one", "tp", "pp", "buckets")
OF_RUNS = ("compare", "recipes", "train")  # not of single checkpoints
VARIANT = {"gpt": "sink", "hybrid": "gated"}


def main(words):
    """Run a command in a process of its own: the CPU platform comes before Megatron."""
    done = server().run(["megasink", *words])
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


@pytest.fixture(scope="module")
def stock():
    """Workers that only Megatron's own loop uses: patches of our trainer stay out of them."""
    with Pool(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def trained(stock, tmp_path_factory):
    """Return (checkpoints, losses of four steps, logits after them) of a class and a layout."""
    known = {}

    def train(kind, layout):
        if (kind, layout) not in known:
            folder = tmp_path_factory.mktemp(f"{kind}-{layout}") / "saved"
            ranks = 1 if layout == "one" else 2
            flags = [*MODEL, *CLASSES[kind]]
            line = [*flags, *LAYOUTS[layout], "--save", str(folder)]
            bridge = str(folder.parent / "bridge") if layout == "one" else None
            found = stock.run(
                f"{TASKS}:pretrain", flags=line, ranks=ranks, port=free_port(), bridge=bridge
            )[ranks - 1]
            if ranks > 1:  # one rank reads the checkpoint, and has no step left
                line = [*flags, "--load", str(folder), "--no-load-optim", "--no-load-rng"]
                alone = {"flags": line, "ranks": 1, "port": free_port()}
                found |= {"logits": stock.run(f"{TASKS}:pretrain", **alone)[0]["logits"]}
            known[kind, layout] = folder, found["losses"], found["logits"]
        return known[kind, layout]

    return train


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", "one"),
        ("hybrid", "dp"),
        ("latent", "one"),
        ("experts", "ep"),
        ("prediction", "pp"),
        *(pytest.param("gpt", layout, marks=pytest.mark.later) for layout in ("tp", "dp", "pp")),
        *(pytest.param("hybrid", other, marks=pytest.mark.later) for other in OTHERS),
        *(pytest.param("experts", other, marks=pytest.mark.later) for other in ("one", "tp-ep")),
    ],
)
def test_logits_and_resumed_losses_are_those_of_megatron(pool, trained, tmp_path, kind, layout):
    saved, losses, logits = trained(kind, layout)
    assert main(["adopt", str(saved), str(tmp_path / "whole")]) == 0
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["arguments"]["attention_variant"] == VARIANT.get(kind, "vanilla")
    found = pool.run(f"{TASKS}:loaded", run=str(tmp_path / "whole"), port=free_port())[0]
    assert np.abs(found - logits).max() < 1e-5
    run = tmp_path / "run"
    assert main(["adopt", str(saved), str(run), "--iteration", "2"]) == 0
    start = json.loads((run / "starts.jsonl").read_text())
    flags = start["command"][1:]
    pool.train([*flags, "--resume", "newest"], start["world_size"])
    found = [line["lm_loss"] for line in steps(run)]
    assert found == pytest.approx(losses[2:], rel=1e-6)


def answer(pool, *line):
    """The exit code and stderr of `megasink adopt`."""
    return pool.run(f"{TASKS}:adopt", lines=[[*map(str, line)]])[0][0]


@pytest.fixture(scope="module")
def model(trained):
    """The folder of one checkpoint of Megatron-LM; beside it, one of Megatron-Bridge."""
    return trained("gpt", "one")[0] / "iter_0000004"


def test_a_checkpoint_of_bridge_is_the_same_model(pool, trained, tmp_path, capsys):
    """Its configuration nests the transformer's, or has all in one, as Bridge 0.6.2 writes it."""
    saved, _, logits = trained("gpt", "one")
    bridge = saved.parent / "bridge"
    shutil.copytree(bridge, tmp_path / "flat")
    file = tmp_path / "flat" / "iter_0000004" / "run_config.yaml"
    config = yaml.safe_load(file.read_text())
    transformer = config["model"].pop("transformer")
    config["model"] = transformer | config["model"]
    function = {"_call_": False, "_target_": "torch.nn.functional.silu"}
    config["model"]["activation_func"] = function
    config["model"]["_target_"] = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    file.write_text(yaml.safe_dump(config))
    refused = tmp_path / "refused" / "iter_0000004"
    shutil.copytree(file.parent, refused)
    spec = {"_target_": "megatron.bridge.models.llama.llama4_utils.get_llama4_layer_spec"}
    for change, told in (
        ({"softmax_scale": 0.5}, "--softmax-scale 0.5"),
        ({"heterogeneous_block_specs": True}, "--heterogeneous-block-specs"),
        ({"transformer_layer_spec": spec}, "get_llama4_layer_spec"),
    ):
        changed = config | {"model": config["model"] | change}
        (refused / "run_config.yaml").write_text(yaml.safe_dump(changed))
        code, said = answer(pool, refused, tmp_path / "run")
        assert code == 2
        assert told in said
    written = tmp_path / "written" / "iter_0000004"
    shutil.copytree(file.parent, written)
    shutil.copy(Path(__file__).with_name("bridge_run_config.yaml"), written / "run_config.yaml")
    folders = {"nested": bridge, "flat": tmp_path / "flat", "written": written.parent}
    for name, folder in folders.items():
        run = tmp_path / name / "run"
        assert main(["adopt", str(folder), str(run)]) == 0
        assert "ignored" not in capsys.readouterr().out
        found = pool.run(f"{TASKS}:loaded", run=str(run), port=free_port())[0]
        assert np.abs(found - logits).max() < 1e-5
        flags = shlex.split((run / "flags.txt").read_text())
        assert flags[flags.index("--ffn-hidden-size") + 1] == "128"
    assert main(["train", "--run-dir", str(run), "--resume"]) == 2
    assert "add --load" in capsys.readouterr().err


def older(pool, model, folder):
    """A copy of a checkpoint as Megatron-Core 0.17 writes it."""
    shutil.copytree(model, folder / model.name)
    pool.run(f"{TASKS}:move_to_common_pt", SINGLE, checkpoint=str(folder / model.name))
    return folder / model.name


def test_a_checkpoint_of_older_versions_is_the_same_run(pool, model, tmp_path):
    older(pool, model, tmp_path / "older")
    found = []
    for name, folder in {"new": model, "old": tmp_path / "older"}.items():
        assert answer(pool, folder, tmp_path / name) == (0, "")
        found.append(json.loads((tmp_path / name / "config.json").read_text()))
    assert found[0]["arguments"] == found[1]["arguments"]
    assert found[0]["identity"] == found[1]["identity"]


@pytest.mark.parametrize(
    "line",
    [
        "analyze {0} --data {1} --output {2}",
        "ablate {0} --data {1} --output {2}",
        "sweep {0} --data {1} --output {2} --lengths 8",
        "evaluate {0} --tasks piqa --output {2}",
        "convert-to-hf {0} --output {2}",
        "generate {0} --prompt a",
        "compare {0}",
        "recipes {0}",
        "train --run-dir {0} --resume",
    ],
)
def test_other_commands_name_adopt(model, tmp_path, capsys, line):
    for folder in (model.parent, model)[: 1 if line.split()[0] in OF_RUNS else 2]:
        assert main(line.format(folder, __file__, tmp_path / "out").split()) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert f"megasink adopt {folder} RUN" in told


def test_the_checkpoint_is_named_if_it_has_moved(pool, model, tmp_path, capsys):
    """The run may move; the checkpoint may not."""
    shutil.copytree(model, tmp_path / "there" / "iter_0000004")
    assert answer(pool, tmp_path / "there", tmp_path / "run")[0] == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    assert main(["checkpoints", str(tmp_path / "moved")]) == 0
    assert "intact" in capsys.readouterr().out
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    assert main(["checkpoints", str(tmp_path / "moved")]) == 0
    assert str(tmp_path / "there") in capsys.readouterr().out


def _without_shards(folder):
    for path in folder.glob("*.distcp"):
        path.unlink()


def _old_format(folder):
    for path in folder.iterdir():
        path.unlink()
    (folder / "mp_rank_00").mkdir()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: (f / ".metadata").write_bytes(b"\x80\x04cposix\nsystem\n."), "posix.system"),
        (lambda f: (f / ".metadata").unlink(), ".metadata is broken"),
        (lambda f: (f / "metadata.json").unlink(), "metadata.json is missing or broken"),
        (_without_shards, "__0_0.distcp is missing"),
        (_old_format, "--ckpt-format torch"),
        (None, "has no arguments"),
        ({"num_layers": 3}, "decoder.layers"),
        ({"hidden_size": 80, "kv_channels": 20}, "does not match the model"),
        ({"hidden_size": 1 << 20}, "hidden_size is 1048576"),
        ({"hidden_size": None}, "--hidden-size"),
        ({"normalization": "batch"}, "--normalization"),
        ({"hybrid_layer_pattern": "M*-"}, "pip install mamba-ssm"),
        ({"multi_latent_attention": True}, "mutually exclusive with multi latent attention"),
        ({"mla_down_proj_fusion": True}, "--mla-down-proj-fusion"),
        ({"spec": ["my.module", "spec"]}, "--spec"),
        ({"softmax_type": "sometimes"}, "--softmax-type sometimes"),
        ({"attention_output_gate": True}, "--softmax-type learnable with --attention-output-gate"),
    ],
)
def test_bad_input_is_one_line(pool, model, tmp_path, change, told):
    folder = tmp_path / "saved" / "iter_0000004"
    shutil.copytree(model, folder)
    if change is None or isinstance(change, dict):
        pool.run(f"{TASKS}:edit", SINGLE, checkpoint=str(folder), changes=change)
    else:
        change(folder)
    for given in (folder.parent, folder):
        code, said = answer(pool, given, tmp_path / "run")
        assert code == 2
        assert told in said
        assert len(said.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_class_among_the_arguments_runs_no_code(pool, model, tmp_path):
    folder = tmp_path / "saved" / "iter_0000004"
    shutil.copytree(model, folder)
    mark = tmp_path / "mark"
    task = {"checkpoint": str(folder), "changes": {}, "code": str(mark)}
    pool.run(f"{TASKS}:edit", SINGLE, **task)
    code, said = answer(pool, folder, tmp_path / "run")
    assert (code, len(said.splitlines())) == (2, 1)
    assert "posix.mkdir" in said
    assert not mark.exists()


def test_an_optimizer_by_buckets_of_a_gpt_model_is_left_out(stock, pool, tmp_path):
    """Megatron's default; its own loop refuses it in a HybridModel."""
    folder = tmp_path / "saved"
    flags = [*MODEL, *CLASSES["gpt"], "--use-distributed-optimizer", "--save", str(folder)]
    flags += ["--train-iters", "1"]
    stock.run(f"{TASKS}:pretrain", flags=flags, ranks=1, port=free_port())
    assert answer(pool, folder, tmp_path / "run") == (0, "")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "--dist-ckpt-optim-fully-reshardable" in config["adopted"]["left_out"][-1]
    assert config["converted_from"] == "Megatron-LM"


def test_flags_that_only_concern_training_are_left_out_by_name(pool, model, tmp_path):
    folder = tmp_path / "saved" / "iter_0000004"
    shutil.copytree(model, folder)
    changes = {"dataloader_type": "cyclic", "sft": True, "wandb_project": "mine", "of_a_fork": 3}
    pool.run(f"{TASKS}:edit", SINGLE, checkpoint=str(folder), changes=changes)
    assert answer(pool, folder, tmp_path / "run")[0] == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    left_out = " ".join(config["adopted"]["left_out"])
    assert all(
        flag in left_out for flag in ("--dataloader-type cyclic", "--sft", "--wandb-project")
    )
    assert not {"--sft", "--wandb-project"} & {
        *(tmp_path / "run" / "starts.jsonl").read_text().split()
    }


DAMAGED = [".metadata", "metadata.json", "common.pt", "__0_0.distcp", "run_config.yaml"]


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_has_no_traceback(pool, model, tmp_path, name):
    """Cut off: refused in one line. A flipped bit: refused, or adopted, as no tensor is read."""
    source = model.parents[1] / "bridge" / model.name if name == "run_config.yaml" else model
    if name == "common.pt":
        source = older(pool, model, tmp_path / "older")
    content, draw = (source / name).read_bytes(), random.Random(name)
    lines = []
    for case in range(8):
        folder = tmp_path / str(case) / model.name
        shutil.copytree(source, folder)
        damaged = bytearray(content)
        if case % 2:
            damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del damaged[draw.randrange(len(content)) :]
        (folder / name).write_bytes(damaged)
        lines.append([str(folder), str(tmp_path / f"run-{case}")])
    for case, (code, said) in enumerate(pool.run(f"{TASKS}:adopt", lines=lines)[0]):
        assert "Traceback" not in said, lines[case]
        assert code in ((0, 2) if case % 2 else (2,)), lines[case]
        assert code == 0 or len(said.splitlines()) == 1 or "problems in" in said
        assert (tmp_path / f"run-{case}").exists() == (code == 0)
