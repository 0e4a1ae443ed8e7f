"""The example script: started by torchrun, bash and Slurm, for bash and for Python."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megasink.training.stop import FOR_TORCHRUN
from tests.distributed.pool import ROOT
from tests.forkserver import server
from tests.runs import steps

SCRIPT = str(ROOT / "examples" / "pretrain_gpt_sink.sh")


def environment(**extra):
    binaries = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        **extra,
    }


# Of the model that the example trains, the sizes alone are others.
SMALL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --split 80,20,0
    --train-iters 2 --eval-interval 2 --eval-iters 1 --save-interval 2
""".split()


@pytest.mark.parametrize("starter", ["torchrun", "bash"])
def test_the_example_starts_in_every_way(starter, text, tmp_path):
    """bash in new processes, torchrun in forks."""
    line = [SCRIPT, *SMALL, "--run-dir", str(tmp_path / "run")]
    variables = environment(DATA_PATH=text[1], TOKENIZER=text[3], RANKS_PER_NODE="1")
    if starter == "torchrun":
        result = server().run(["torch.distributed.run", *line], env=variables, tree=True)
    else:
        result = subprocess.run(
            [starter, *line], env=variables, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr[-3000:]
    assert [step["iteration"] for step in steps(tmp_path / "run")] == [1, 2]
    flags = ["--output", str(tmp_path / "hf"), "--device", "cpu"]
    done = server().run(["tools.convert_to_hf", str(tmp_path / "run"), *flags])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no architecture of transformers supports sink attention, relu2 plain FFN" in done.stdout
    assert "100% of 16 generated tokens" in done.stdout


def test_slurm_gives_the_meeting_point(tmp_path):
    """srun starts one copy on each node; torchrun is stubbed, Slurm's variables are not."""
    for name, body in {
        "python": '[ "$2" = megasink.training.network ] && echo 10.0.0.8 0 || printf "%s\\n" "$@"',
        "scontrol": "printf 'node7\\nnode8\\n'",
        "nvidia-smi": "printf 'GPU 0\\nGPU 1\\n'",
    }.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "4711",
    }
    result = subprocess.run(
        ["bash", SCRIPT, "--lr", "1"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    words = result.stdout.split()
    joined = " ".join(words)
    assert "--nnodes 2 --nproc-per-node 2" in joined
    assert "--rdzv-backend c10d --rdzv-endpoint node7:29500 --rdzv-id 4711" in joined
    assert "--local-addr 10.0.0.8 --rdzv-conf is_host=0" in joined
    assert FOR_TORCHRUN in words
    assert words[-3:] == [SCRIPT, "--lr", "1"]


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, "2"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "4"),
        ({"CUDA_VISIBLE_DEVICES": "5", "SLURM_GPUS_ON_NODE": "4"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "1,0,GPU-3f"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "RANKS_PER_NODE": "8"}, "8"),
        ({"GPUS": ""}, "1"),
    ],
    ids=str,
)
def test_a_rank_for_each_device_that_the_process_may_use(tmp_path, variables, ranks):
    for name, body in {
        "python": 'printf "%s\\n" "$@"',
        "nvidia-smi": r"""printf "${GPUS-GPU 0: A\n  MIG 1g.5gb\nGPU 1: B\n}" """,
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
    without = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        ["bash", SCRIPT],
        env=without | paths | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"--nproc-per-node\n{ranks}\n" in done.stdout


def test_the_example_is_whole_for_bash_and_for_python():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    compile(Path(SCRIPT).read_text(), SCRIPT, "exec")


def test_shell_scripts_pass_the_checker():
    """The one that `make env` installs; the Python part of the example is a here document to it."""
    scripts = (".ci/run", "docker/entrypoint.sh", "tools/make_env.sh", *ROOT.glob("examples/*.sh"))
    checker = Path(sys.executable).with_name("shellcheck")
    assert checker.is_file(), "run `make env`: constraints.txt has a new package"
    checked = subprocess.run([checker, *scripts], cwd=ROOT, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_example_goes_on_where_it_has_a_run_folder(monkeypatch):
    """The same line again, as a scheduler gives it."""
    flags = runpy.run_path(SCRIPT)["flags"]
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.delenv("RUN_DIR", raising=False)
    assert "--resume" not in flags()
    monkeypatch.setattr(sys, "argv", ["x", "--run-dir=a", "--resume"])
    assert flags()[:2] == ["--resume", "auto"]
    assert flags()[-1] == "--resume"  # the last one counts
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setenv("RUN_DIR", "a")
    assert flags()[:2] == ["--resume", "auto"]
