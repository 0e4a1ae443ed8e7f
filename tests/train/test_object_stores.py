"""Data sets in object stores: a local S3 server, through boto3 and multi-storage-client."""

import importlib.util
import json
from pathlib import Path

import pytest

from megasink.data import object_store
from megasink.data.object_store import StoredTokens, fetch, look, url_problem
from megasink.data.output import output_problems
from megasink.errors import UserError
from megasink.train import early
from megasink.train.checks import data, data_files
from megasink.train.differences import _absolute
from megasink.train.replay import replayed
from megasink.train.run_dir import folder_problem
from tests import runs
from tests.distributed.pool import free_port
from tests.train.conftest import FILES, SECRET

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


def problems(cache, text, *flags):
    """What the checks say of a command line, the first ones and those of rank 0."""
    given = [*runs.TINY, "--train-iters", "2", "--split", "90,10,0", *text[2:], *flags]
    given += ["--no-mmap-bin-files", "--object-storage-cache-path", str(cache)]
    args = early.read(given)
    args.rank, args.world_size = 0, 1
    return [*data.problems(args), *data_files.problems(args)]


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
        "tests.train.store_tasks:train",
        flags=[*given, "--object-storage-cache-path", str(cache)],
        ranks=1,
        port=free_port(),
        variables=server.variables,
    )
    assert losses(run) == expected
    written = [path for path in [*run.rglob("*"), *cache.rglob("*")] if path.is_file()]
    assert len(written) > 8
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_what_is_wrong_with_the_data_is_found_there(store, text, tmp_path):
    content = {suffix: Path(f"{text[1]}{suffix}").read_bytes() for suffix in FILES}
    other = ("--data-path", "s3://corpora/web/other")
    assert problems(tmp_path, text, "--data-path", "s3://corpora/web/text") == []
    (missing,) = problems(tmp_path, text, *other)
    assert "s3://corpora/web/other.bin and s3://corpora/web/other.idx not found" in missing
    for suffix in (".bin", ".idx"):  # as of Megatron's own tool
        store(suffix, content[suffix])
    assert problems(tmp_path, text, *other) == []
    store(".bin", content[".bin"][:-2])
    (short,) = problems(tmp_path, text, *other)
    assert short.startswith("--data-path s3://corpora/web/other: ")
    assert "cut short" in short
    store(".bin", b"\xff\xff" + content[".bin"][2:])
    (unknown,) = problems(tmp_path, text, *other)
    assert "holds the id 65,535 at token 0" in unknown
    store(".bin", content[".bin"])
    sidecar = json.loads(content[".json"])
    sidecar["tokenizer"]["sha256"] = "0" * 64
    store(".json", json.dumps(sidecar).encode())
    (tokenizer,) = problems(tmp_path, text, *other)
    assert "whose tokens differ from those of" in tokenizer
    store(".json", json.dumps(sidecar | {"kind": "chat"}).encode())
    assert "which are read from file systems alone" in problems(tmp_path, text, *other)[0]


def test_a_store_that_does_not_answer_is_one_line(store, text, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    (problem,) = problems(tmp_path, text, "--data-path", "s3://corpora/web/text")
    assert "cannot be read: EndpointConnectionError (look at the credentials" in problem
    assert SECRET not in problem
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    (problem,) = problems(tmp_path, text, "--data-path", "s3://corpora/web/text")
    assert "needs the package boto3: pip install 'megasink[storage]'" in problem


@pytest.mark.parametrize("scheme", ["s3://corpora", "msc://stored"])
def test_an_index_is_downloaded_once_and_again_if_it_changes(store, tmp_path, monkeypatch, scheme):
    if scheme.startswith("msc"):
        pytest.importorskip("multistorageclient")
    store(".idx", b"one")
    store(".json", b"{}")
    local = Path(fetch(f"{scheme}/web/other", tmp_path) + ".idx")
    assert local == tmp_path / scheme.partition("://")[2] / "web" / "other.idx"
    assert local.read_bytes() == b"one"
    downloads = []
    download = object_store.download
    monkeypatch.setattr(
        object_store, "download", lambda url, path: (downloads.append(url), download(url, path))
    )
    fetch(f"{scheme}/web/other", tmp_path)
    assert downloads == []
    store(".idx", b"three")
    fetch(f"{scheme}/web/other", tmp_path)
    assert downloads == [f"{scheme}/web/other.idx"]
    assert local.read_bytes() == b"three"
    assert sorted(p.name for p in local.parent.iterdir()) == ["other.idx", "other.json"]
    store(".bin", bytes(range(100)))
    tokens = StoredTokens(f"{scheme}/web/other")
    assert tokens.size == look(f"{scheme}/web/other.bin").size == 100
    np = pytest.importorskip("numpy")
    assert tokens.read(np.dtype("u1"), slice(40, 43)).tolist() == [40, 41, 42]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/../../etc/x", "does not name a bucket or profile and a key"),
        ("s3:///etc/x", "does not name a bucket or profile and a key"),
        ("s3://bucket", "does not name a bucket or profile and a key"),
        ("s3:/bucket/x", "is no URL of an object store"),
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
    (problem,) = early.read([*runs.TINY, *text, "--enable-msc"]).flag_problems
    assert problem.startswith("--enable-msc needs the package multi-storage-client")


def test_checkpoints_are_not_read_through_another_library(text, monkeypatch):
    """Its reader is not the one that the tests of security are about."""
    pytest.importorskip("multistorageclient")
    from megatron.core.msc_utils import MultiStorageClientFeature

    from megasink.parser import parse_apart
    from megasink.train.dataset import reading_stores

    args = parse_apart([*runs.TINY, *text, "--train-iters", "2", "--cpu", "--enable-msc"])
    assert args.enable_msc
    assert not MultiStorageClientFeature.is_enabled()
    with reading_stores(args):
        assert MultiStorageClientFeature.is_enabled()
    assert not MultiStorageClientFeature.is_enabled()


def test_stores_are_for_data_alone_and_asked_for_each_time(text, tmp_path):
    flags = [*runs.TINY, "--train-iters", "2", "--split", "1,0,0", *text[2:]]
    args = early.read([*flags, "--data-path", "msc://p/x", "--save", "s3://b/c", "--load=msc://p"])
    found = "\n".join(data.problems(args))
    for part in (
        "--save is in an object store: give a folder (--checkpoint-store URL copies",
        "--load is in an object store",
        "msc:// data needs --object-storage-cache-path FOLDER",
        "msc:// data needs --no-mmap-bin-files",
        "msc:// data needs --enable-msc",
    ):
        assert part in found
    assert "is in an object store" in folder_problem(Path("s3://bucket/run"), resume=None)
    assert "is in an object store" in output_problems(Path("s3://b/x"), [], overwrite=False)[0]
    last = ["--data-path", "s3://bucket/x", "--lr", "1e-3"]
    with pytest.raises(UserError, match=r"had --data-path s3://bucket/x, which is not reused"):
        replayed(last, [], tmp_path)
    assert replayed(last, last[:2], tmp_path) == last[2:]
    assert _absolute(["0.5", "s3://bucket/x"], "/a") == ["/a/0.5", "s3://bucket/x"]
