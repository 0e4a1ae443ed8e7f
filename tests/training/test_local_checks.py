"""What a launcher knows of this machine without torch and transformers is what they know."""

import json
import pickle
import subprocess
import sys
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megasink.attention import AttentionRequest, choose_backend, choose_gate_kernels
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.data.hf_tokenizer import load_tokenizer, tokenizer_hash
from megasink.data.tokenizer_files import read_files
from megasink.errors import UserError
from megasink.training.checks import device_options
from megasink.training.dataset_blends import shares
from megasink.upstream import fused_kernels
from tests.analysis.capture.tiny_models import save_with_tokenizer
from tests.distributed.layout import SINGLE
from tests.forkserver import server
from tests.parsing import read

TEXTS = [f"Text {i}: nothing in it stands twice, {'again ' * i}and it ends." for i in range(5)]


def test_the_kernels_that_need_cuda_are_those_of_the_registries():
    request = AttentionRequest("cpu", torch.float32, 64)
    reasons = choose_backend(request).reasons | choose_gate_kernels(request).reasons
    assert {name for name, why in reasons.items() if "CUDA" in why} == device_options.CUDA_KERNELS


@pytest.mark.parametrize("impl", [None, "local", "transformer_engine"])
@pytest.mark.parametrize("missing", [None, "the package is not installed"])
def test_norms_of_transformer_engine_on_a_gpu(monkeypatch, impl, missing):
    """Without the flag, a launcher does not know the default of the ranks."""
    monkeypatch.setattr(fused_kernels.Package, "missing", lambda _: missing)
    args = read(["--apply-layernorm-1p", "--normalization", "RMSNorm"])
    args.transformer_impl = impl
    said = "\n".join(fused_kernels.problems(args))
    works = impl == "transformer_engine" or (impl is None and missing is None)
    assert ("torch's norms have no zero-centered weight" in said) == (not works)


@pytest.mark.parametrize(
    ("recipe", "asked", "supported"),
    [
        ("delayed", "is_fp8_available", False),
        ("tensorwise", "is_fp8_available", False),
        ("blockwise", "is_fp8_block_scaling_available", False),
        ("mxfp8", "is_mxfp8_available", False),
        ("mxfp8", "is_mxfp8_available", True),
    ],
)
def test_an_fp8_recipe_that_the_device_lacks_is_refused(monkeypatch, recipe, asked, supported):
    """TransformerEngine's layers would raise in the first step."""
    answer = (supported, "" if supported else "Device compute capability 8.9 or higher required.")
    engine = {
        fused_kernels.TRANSFORMER_ENGINE.module: SimpleNamespace(**{asked: lambda **_: answer})
    }
    monkeypatch.setattr(device_options, "import_module", engine.__getitem__)
    monkeypatch.setattr(fused_kernels.Package, "missing", lambda _: None)
    monkeypatch.setattr(device_options, "without_cuda", lambda _: False)
    args = read(["--fp8-format", "hybrid", "--fp8-recipe", recipe, "--bf16"])
    args.transformer_impl = "transformer_engine"
    said = [text for text in device_options.problems(args) if "--fp8-recipe" in text]
    assert len(said) == (not supported)
    assert all(f"--fp8-recipe {recipe}: Device" in text for text in said)


H100, B200 = (9, 0), (10, 0)
DENSE = "--hidden-size 256 --num-attention-heads 4 --swiglu --seq-length 256 --micro-batch-size 2"
QUERY_GROUPS = "--group-query-attention --num-query-groups"


@pytest.mark.parametrize(
    ("recipe", "capability", "flags", "wanted"),
    [
        ("mxfp8", B200, "", []),
        ("mxfp8", B200, "--attention-variant gated", []),
        ("mxfp8", B200, "--hidden-size 240 --kv-channels 64", ["--hidden-size is 240"]),
        ("mxfp8", B200, "--ffn-hidden-size 336", ["--ffn-hidden-size is 336"]),
        ("blockwise", H100, "--ffn-hidden-size 336", []),
        ("blockwise", H100, "--seq-length 252", ["--seq-length is 504"]),
        ("blockwise", B200, "--seq-length 252", []),
        ("delayed", B200, "--seq-length 254", ["--seq-length is 508"]),
        # A part of the sequence is quantized before it is gathered.
        ("mxfp8", B200, "--seq-length 272", []),
        ("mxfp8", B200, "--seq-length 272 --tensor-model-parallel-size 2", []),
        (
            "mxfp8",
            B200,
            "--seq-length 272 --tensor-model-parallel-size 2 --sequence-parallel",
            ["--seq-length is 272"],
        ),
        (
            "delayed",
            H100,
            "--num-attention-heads 3 --kv-channels 40",
            ["x --kv-channels is 120", "key and value is 360"],
        ),
        ("delayed", H100, f"--kv-channels 40 {QUERY_GROUPS} 1", []),
        ("mxfp8", B200, f"--kv-channels 40 {QUERY_GROUPS} 1", ["key and value is 240"]),
        ("mxfp8", B200, f"--kv-channels 40 {QUERY_GROUPS} 1 --attention-variant gated", []),
        ("mxfp8", B200, "--num-experts 4 --moe-ffn-hidden-size 336", ["--moe-ffn-hidden-size is"]),
    ],
)
def test_sizes_that_an_fp8_gemm_refuses(recipe, capability, flags, wanted):
    """As tests/plan/hollow/test_engine.py finds them in TransformerEngine; one line each."""
    fp8 = f"--bf16 --fp8-format hybrid --fp8-recipe {recipe} --attention-variant sink"
    args = read(f"{DENSE} {fp8} {flags}".split())
    found = list(device_options.uneven_sizes(args, capability))
    assert len(found) == len(wanted)
    assert all(phrase in text for phrase, text in zip(wanted, found, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizer")
    save_with_tokenizer(root, "llama", TEXTS, 330)
    return next(path.parent for path in root.rglob("tokenizer.json"))


@pytest.mark.parametrize("change", ["none", "added", "named", "class", "more", "eos", "broken"])
def test_a_tokenizer_is_what_transformers_makes_of_its_files_or_is_not_certain(
    folder, tmp_path, change
):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = {"content": "<|new|>", "special": True, "lstrip": False, "rstrip": False}
    added |= {"single_word": False, "normalized": False}
    if change == "added":
        config["added_tokens_decoder"] = {"999": added}
    elif change == "named":
        config["mask_token"] = "<|mask|>"
    elif change == "class":
        config["tokenizer_class"] = "LlamaTokenizerFast"
    elif change == "more":
        (tmp_path / "added_tokens.json").write_text('{"<|new|>": 999}')
    elif change == "eos":
        config["eos_token"] = "<|none|>"
    elif change == "broken":
        (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_files(tmp_path)
    if change == "none":
        whole = load_tokenizer(tmp_path)
        assert found.is_certain
        assert (len(found), found.eos_token_id) == (len(whole), whole.eos_token_id)
        assert tokenizer_hash(found) == tokenizer_hash(whole)
    else:
        assert found is None or not found.is_certain


def test_parts_of_a_split_end_where_megatrons_end(pool):
    splits = ["969,30,1", "100,0,0", "1,1", "99990,8,2", "0.7,0.2,0.1", "3,3,3", "1,0,1", "7"]
    (expected,) = pool.run("tests.training.tasks:ends_of_splits", SINGLE, splits=splits)
    assert [list(accumulate(shares(split), initial=0.0)) for split in splits] == expected


class _Runs:
    def __reduce__(self):
        return print, ("code of a checkpoint",)


def _index(folder, file="__0_0.distcp", extra=None):
    """Write the index of a checkpoint with one tensor."""
    whole = torch.Size([2, 3])
    chunks = [metadata.ChunkStorageMetadata(torch.Size([0, 0]), whole)]
    properties = metadata.TensorProperties(dtype=torch.bfloat16)
    index = metadata.Metadata(
        {"w": metadata.TensorStorageMetadata(properties, whole, chunks)},
        planner_data=extra,
        storage_data={metadata.MetadataIndex("w", [0, 0]): _StorageInfo(file, 3, 12)},
    )
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_an_index_says_the_same_without_torch(tmp_path):
    _index(tmp_path)
    for quick in (True, False):
        (entry,) = read_metadata(tmp_path, quick=quick).storage_data.values()
        assert (entry.relative_path, entry.offset, entry.length) == ("__0_0.distcp", 3, 12)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"file": "../x"}, "'../x' is not a plain file name"),
        ({"extra": _Runs()}, "it refers to the code builtins.print"),
    ],
)
def test_a_hostile_index_is_refused_without_torch_too(tmp_path, capsys, given, says, quick):
    _index(tmp_path, **given)
    with pytest.raises(UserError, match=says):
        read_metadata(tmp_path, quick=quick)
    assert capsys.readouterr().out == ""


def test_nothing_heavy_is_imported(tmp_path):
    line = [
        "train",
        "--device",
        "cpu",
        "--run-dir",
        str(tmp_path / "run"),
        "--profile",
        "--mock-data",
    ]
    script = (
        "import sys\nfrom pathlib import Path\nfrom megasink.cli import main\n"
        "from megasink.training import preflight\nfrom tests import forkserver\n"
        "def start(file):\n"
        "    module, here = 'megasink.training.preflight', Path.cwd()\n"
        "    return forkserver.server().start([module], stdin=file, cwd=here).wait()\n"
        "preflight.start = start\n"
        f"code = main({line!r})\n"
        "heavy = {'torch', 'transformers', 'megatron.core', 'megatron.training'}\n"
        "print(code, sorted(heavy & set(sys.modules)))\n"
    )
    server()
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "2 []\n"
    assert "--profile needs CUDA" in result.stderr
