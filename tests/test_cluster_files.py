"""The files for Slurm and Kubernetes: what the schedulers accept, and what the trainer does."""

import copy
import json
import os
import re
import signal
import subprocess

import jsonschema
import pytest
import yaml

from megasink.training import recipes
from tests.documented import EXAMPLE, ROOT
from tests.parsing import refuse
from tests.waiting import until

SLURM = ROOT / "examples" / "slurm.sh"
MANIFEST = ROOT / "examples" / "kubernetes.yaml"
# sbatch(1): options of the file, and the form of their values.
OPTIONS = {
    "job-name": r"\w+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "exclusive": "",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    "signal": r"([RB]{1,2}:)?(USR1|TERM)(@\d+)?",
    "requeue": "",
    "open-mode": "append|truncate",
    "output": r"[\w%.-]+",
}


def options():
    lines = re.findall(r"^#SBATCH (.*)$", SLURM.read_text(), re.M)
    return {name: value for name, _, value in (line[2:].partition("=") for line in lines)}


def closed(schema):
    """The schema as the API server takes it with --validate=strict: no unknown names."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found


@pytest.fixture(scope="module")
def manifest():
    return yaml.safe_load(MANIFEST.read_text())


@pytest.fixture(scope="module")
def schema():
    return closed(json.loads((ROOT / "tests" / "pytorchjob.schema.json").read_text()))


def test_the_manifest_follows_the_schema_of_the_operator(manifest, schema):
    jsonschema.validate(manifest, schema)
    for path, value in (
        (("spec", "nprocPerNode"), 8),  # a string, in the operator's type
        (("spec", "pytorchReplicaSpecs", "Worker", "restartPolicies"), "OnFailure"),
        (("spec", "pytorchReplicaSpecs", "Worker", "replicas"), "3"),
        (("spec", "runPolicy", "backofLimit"), 1),
    ):
        wrong = copy.deepcopy(manifest)
        place = wrong
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_manifest_starts_the_script_of_the_image(manifest, monkeypatch):
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    assert specs["Master"]["template"] == specs["Worker"]["template"]
    pod = specs["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # training-operator's own name for it
    entry, shell, script = container["command"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"COPY docker/{entry} /usr/local/bin/{entry}" in dockerfile
    assert (shell, script) == ("bash", "/opt/megasink/examples/pretrain_gpt_sink.sh")
    assert "WORKDIR /opt/megasink\n" in dockerfile
    assert "COPY examples examples\n" in dockerfile
    per_node = int(manifest["spec"]["nprocPerNode"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == per_node
    text = EXAMPLE.read_text()
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    for name in (*variables, "MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "PET_NPROC_PER_NODE"):
        assert re.search(rf"\${{{name}\b|\"{name}\"", text), name
    grace = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)", text)[1]
    assert pod["terminationGracePeriodSeconds"] == int(grace)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    nodes = sum(replica["replicas"] for replica in specs.values())
    flags = recipes.expanded([*container["args"], "--run-dir", "nowhere/run"])
    refuse([*flags, "--mock-data", "--tokenizer-type", "NullTokenizer"], nodes * per_node)


def test_the_file_of_slurm_has_options_of_sbatch():
    subprocess.run(["bash", "-n", SLURM], check=True)
    given = options()
    for name, value in given.items():
        assert re.fullmatch(OPTIONS[name], value), name
    assert given["ntasks-per-node"] == "1"  # torchrun starts the ranks of a node
    assert given["signal"] == "B:USR1@600"


STUBS = {
    "scontrol": 'echo "scontrol $*" >> calls; [[ $1 != show ]] || printf "node7\\nnode8\\n"',
    # All steps of the job.
    "scancel": 'echo "scancel $*" >> calls; kill -USR1 "$(cat step)"',
    # The ranks of this step save on SIGUSR1, and end; CODE is torchrun's.
    "srun": """
        trap 'echo saved >> calls; exit $CODE' USR1
        echo $$ > step; echo "srun $MASTER_ADDR $*" >> calls
        [[ -z $WAITS ]] || for _ in {1..6000}; do sleep 0.1; done
        exit $CODE
    """,
}


@pytest.fixture
def job(tmp_path):
    """Start the batch file where Slurm's programs note how they are called."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "7", "RUN_DIR": "/r"}
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    calls = tmp_path / "calls"

    def start(**others):
        process = subprocess.Popen(
            ["bash", SLURM, "--lr", "1"], env={**os.environ, **variables, **others}, cwd=tmp_path
        )
        return process, calls

    return start


@pytest.mark.parametrize(("code", "requeued"), [("1", True), ("0", False)])
def test_after_the_warning_an_unfinished_run_is_requeued(job, code, requeued):
    process, calls = job(WAITS="1", CODE=code)
    until(lambda: calls.is_file() and "srun" in calls.read_text())
    process.send_signal(signal.SIGUSR1)
    assert process.wait(600) == int(code)
    said = calls.read_text()
    srun = "srun node7 --kill-on-bad-exit=1 bash examples/pretrain_gpt_sink.sh --lr 1"
    assert srun in said.splitlines()
    assert "scancel --signal=USR1 7" in said
    assert "saved" in said
    assert ("scontrol requeue 7" in said) is requeued


def test_an_error_is_not_requeued_and_a_container_has_the_images_script(job):
    process, calls = job(WAITS="", CODE="3", IMAGE="megasink.sqsh", MOUNTS="/shared")
    assert process.wait(600) == 3
    said = calls.read_text()
    assert "--container-image=megasink.sqsh --container-mounts=/shared" in said
    assert "bash /opt/megasink/examples/pretrain_gpt_sink.sh --lr 1" in said
    assert "requeue" not in said
