"""Data sets in object stores: a local S3 server, through boto3 and multi-storage-client."""

import importlib.util
from pathlib import Path

import pytest

from megasink.data.dataset_files import output_problems, url_problem
from megasink.errors import UserError
from megasink.training.checks import data_contents, data_paths
from megasink.training.resume_flags import _absolute, replayed
from megasink.training.run_dir import folder_problem
from tests import runs
from tests.distributed.pool import free_port
from tests.parsing import read
from tests.training.conftest import SECRET

FLAGS = "--no-mmap-bin-files --split 90,10,0 --eval-iters 1 --num-workers 1 --train-iters 2".split()


@pytest.fixture(scope="module")
def from_files(text, pool, tmp_path_factory):
    """Losses of a run on the files, and the flags of all runs here but --data-path."""
    flags = [*runs.TINY, *runs.UNTIED, *FLAGS, *text[2:], "--eval-interval", "100"]
    folder = tmp_path_factory.mktemp("files") / "run"
    pool.train([*flags, "--run-dir", str(folder), *text[:2]])
    return losses(folder), flags


def losses(folder):
    return [(line["lm_loss"], line["grad_norm"]) for line in runs.steps(folder)]


@pytest.mark.parametrize(
    ("url", "flags"), [("s3://corpora/web/text", []), ("msc://stored/web/text", ["--enable-msc"])]
)
def test_a_run_on_a_store_is_a_run_on_files(url, flags, server, from_files, pool, tmp_path):
    if flags:
        pytest.importorskip("multistorageclient")
    expected, common = from_files
    run, cache = tmp_path / "run", tmp_path / "cache"
    given = [*common, *flags, "--run-dir", str(run), "--data-path", url]
    pool.run(
        "tests.training.store_tasks:train",
        flags=[*given, "--object-storage-cache-path", str(cache)],
        ranks=1,
        port=free_port(),
        variables=server.variables,
    )
    assert losses(run) == expected
    written = [path for path in [*run.rglob("*"), *cache.rglob("*")] if path.is_file()]
    assert len(written) > 8
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/../../etc/x", "does not name a bucket or profile and a key"),
        ("s3:///etc/x", "does not name a bucket or profile and a key"),
        ("s3://bucket", "does not name a bucket or profile and a key"),
        ("s3:/bucket/x", "is not the URL of an object: "),
        (f"s3://id:{SECRET}@bucket/x", "would put credentials into the run folder"),
        (f"s3://bucket/x?X-Amz-Signature={SECRET}", "would put credentials into the run folder"),
        ("s3://bucket/a/x", None),
        ("msc://profile/x", None),
    ],
)
def test_urls_that_are_refused(url, says):
    problem = url_problem(url)
    assert (says in problem and SECRET not in problem) if says else problem is None


def test_msc_without_its_package(text, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: real(name) if "multi" not in name else None
    )
    (problem,) = read([*runs.TINY, *text, "--enable-msc"]).flag_problems
    assert problem.startswith("--enable-msc needs the package multi-storage-client")


def test_checkpoints_are_not_read_through_another_library(text, monkeypatch):
    """Its reader is not the one that the tests of security are about."""
    pytest.importorskip("multistorageclient")
    from megatron.core.msc_utils import MultiStorageClientFeature

    from megasink.megatron.argument_parser import parse_apart
    from megasink.training.build_datasets import reading_stores

    args = parse_apart([*runs.TINY, *text, "--train-iters", "2", "--device", "cpu", "--enable-msc"])
    assert args.enable_msc
    assert not MultiStorageClientFeature.is_enabled()
    with reading_stores(args):
        assert MultiStorageClientFeature.is_enabled()
    assert not MultiStorageClientFeature.is_enabled()


def test_stores_are_for_data_alone_and_asked_for_each_time(text, tmp_path, capsys):
    flags = [*runs.TINY, "--train-iters", "2", "--split", "1,0,0", *text[2:]]
    args = read([*flags, "--data-path", "msc://p/x", "--save", "s3://b/c", "--load=msc://p"])
    found = "\n".join(data_paths.problems(args))
    for part in (
        "--save is in an object store: give a folder (copy checkpoints with aws",
        "--load is in an object store",
        "msc:// data needs --object-storage-cache-path FOLDER",
        "msc:// data needs --no-mmap-bin-files",
        "msc:// data needs --enable-msc",
    ):
        assert part in found
    assert "is in an object store" in folder_problem(Path("s3://bucket/run"), resume=None)
    assert "is in an object store" in output_problems(Path("s3://b/x"), [], overwrite=False)[0]
    args.rank = 0
    assert list(data_contents.problems(args)) == []
    assert "1 of 1 data sets are in object stores and are not checked" in capsys.readouterr().out
    last = ["--data-path", "s3://bucket/x", "--lr", "1e-3"]
    with pytest.raises(UserError, match=r"--data-path s3://bucket/x of the last .* is not reused"):
        replayed(last, [], tmp_path)
    assert replayed(last, last[:2], tmp_path) == last[2:]
    blend = ["0.5", "b", "0.5", "s3://bucket/x"]
    assert _absolute(blend, "/a") == ["0.5", "/a/b", "0.5", "s3://bucket/x"]
