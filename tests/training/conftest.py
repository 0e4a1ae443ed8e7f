"""A run that never stopped, and runs that die: shared by the files of this folder."""

import contextlib
import json
import logging
import os
import signal
from types import SimpleNamespace

import pytest

from megasink.cli import main
from tests import forkserver
from tests.distributed.pool import free_port
from tests.runs import SOURCES
from tests.training.six_steps import FLAGS
from tests.waiting import session, until

SECRET = "a-key-that-nobody-may-see"
FILES = (".bin", ".idx", ".json")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Flags of a small data set of real text."""
    prefix = tmp_path_factory.mktemp("text") / "sources"
    arguments = ["data", str(SOURCES), "--output", str(prefix)]
    assert main([*arguments, "--train-tokenizer", "512", "--workers", "1"]) == 0
    return ["--data-path", str(prefix), "--tokenizer-model", f"{prefix}-tokenizer"]


@pytest.fixture(scope="session")
def train(pool):
    """Run the trainer to its end in a worker."""
    return lambda folder, *flags: pool.train([*FLAGS, "--run-dir", str(folder), *flags])


@pytest.fixture(scope="session")
def finished(train, tmp_path_factory):
    """A run that never stopped: checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder)
    return folder


@pytest.fixture(scope="session")
def dying():
    """Train in a process of its own that dies: its exit code and what it said.

    Nothing that it started may be left soon after.
    """
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}

    def run(moment, folder, *flags):
        variables = numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        errors = folder.with_suffix(".stderr")
        process = forkserver.server().start(
            ["tests.training.dying_entry", moment, *FLAGS, "--run-dir", str(folder), *flags],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=folder.with_suffix(".stdout"),
            stderr=errors,
        )
        try:
            code = process.wait(forkserver.HANG_SECONDS)
            until(lambda: not session(process.pid), lambda: session(process.pid))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return code, errors.read_text()

    return run


@pytest.fixture(scope="session")
def server(text, tmp_path_factory):
    """A local S3 server with a data set: its variables, and a client.

    One a process, as long as multi-storage-client keeps its own clients.
    """
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    folder = tmp_path_factory.mktemp("store")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto_server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    moto_server.start()
    url = "http://{}:{}".format(*moto_server.get_host_and_port())
    profile = {"base_path": "corpora", "endpoint_url": url, "region_name": "us-east-1"}
    config = {"profiles": {"stored": {"storage_provider": {"type": "s3", "options": profile}}}}
    (folder / "msc.json").write_text(json.dumps(config))
    variables = {
        "AWS_ACCESS_KEY_ID": "an-id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "MSC_CONFIG": str(folder / "msc.json"),
    }
    keys = {f"aws_{name}": v for name, v in [("access_key_id", "a"), ("secret_access_key", "b")]}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="corpora")
    for suffix in FILES:
        client.upload_file(f"{text[1]}{suffix}", "corpora", f"web/text{suffix}")
    yield SimpleNamespace(variables=variables, client=client)
    moto_server.stop()
