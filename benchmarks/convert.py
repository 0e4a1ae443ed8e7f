"""What a conversion costs: against cp of the same bytes, and memory against the largest tensor.

    python benchmarks/convert.py            # 2 GB, files in the page cache
    python benchmarks/convert.py --cold     # the page cache is dropped before each (root)

A checkpoint of a Llama shape with sinks in bfloat16 is written by torch.distributed.checkpoint's
own writer, as four ranks of TP=2 x PP=2 would have. Then in turn: `cp` and `sync` of its files,
convert-to-hf without verification, which syncs what it writes, and convert-from-hf of the export.
Each conversion runs in a process of its own; time and memory count from after its imports.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from megasink.convert.architecture import Architecture

LAYERS, TP, PP = 16, 2, 2
MODEL = Architecture(
    layers=LAYERS,
    hidden=2048,
    heads=32,
    groups=8,
    head_dim=64,
    ffn=5632,
    vocabulary=32000,
    padded=32000,
    tied=False,
    positions=4096,
    norm_eps=1e-5,
    attention="sink",
    windows=(None,) * LAYERS,
    dtype="bfloat16",
)
# The axis that tensor parallelism cuts.
_CUT = {"linear_qkv.weight": 0, "linear_fc1.weight": 0, "word_embeddings.weight": 0}
_CUT |= {"output_layer.weight": 0, "linear_proj.weight": 1, "linear_fc2.weight": 1}
_CUT |= {"softmax_offset": 0}


def write_run(folder: Path) -> None:
    """A run folder with the checkpoint."""
    from megasink import cpu

    cpu.activate()
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        SavePlanner,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    from megasink.convert.from_hf import arguments_of, plain
    from megasink.convert.megatron_weights import weight_shapes
    from megasink.convert.model_flags import model_flags

    class Random(SavePlanner):
        """Makes each shard when it is written."""

        def resolve_data(self, write_item):
            data = write_item.tensor_data
            return torch.randn(data.chunk.sizes).mul_(0.02).to(data.properties.dtype)

        create_local_plan = create_global_plan = finish_plan = set_up_planner = None

    plans = [SavePlan([]) for _ in range(TP * PP)]
    tensors = {}
    for key, shape in weight_shapes(MODEL).items():
        layered = key.startswith("decoder.layers.")
        dtype = torch.float32 if key.endswith("softmax_offset") else torch.bfloat16
        properties, whole = TensorProperties(dtype=dtype), (LAYERS,) * layered + shape
        cut = next((axis for name, axis in _CUT.items() if key.endswith(name)), None)
        tensors[key] = TensorStorageMetadata(properties, torch.Size(whole), [])
        for layer in range(LAYERS if layered else 1):
            stage = layer * PP // LAYERS if layered else (PP - 1) * ("embedding" not in key)
            for rank in range(1 if cut is None else TP):
                sizes, offsets = list(shape), [0] * len(shape)
                if cut is not None:
                    sizes[cut] //= TP
                    offsets[cut] = rank * sizes[cut]
                chunk = ChunkStorageMetadata(
                    torch.Size([layer] * layered + offsets), torch.Size([1] * layered + sizes)
                )
                tensors[key].chunks.append(chunk)
                item = WriteItem(
                    MetadataIndex(key, chunk.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, properties, torch.Size(whole)),
                )
                plans[stage * TP + rank].items.append(item)
    checkpoint = folder / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    writer = FileSystemWriter(checkpoint, single_file_per_rank=True, sync_files=True)
    writer.set_up_storage_writer(True)
    writer.storage_meta = lambda: None  # as Megatron's: where it was written is not kept
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    Random.__abstractmethods__ = frozenset()
    results = [writer.write_data(plan, Random()).wait() for plan in plans]
    writer.finish(Metadata(tensors), results)
    content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (checkpoint / "metadata.json").write_text(json.dumps(content))
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    args, _ = arguments_of(model_flags(MODEL))
    args.vocab_size, args.tokenizer_type = MODEL.vocabulary, "NullTokenizer"
    saved = {name: plain(value) for name, value in vars(args).items()}
    (folder / "config.json").write_text(json.dumps({"arguments": saved}))


class Memory:
    """The growth of this process's memory while a body runs: sampled, and the kernel's peak."""

    def __enter__(self) -> "Memory":
        self._before = self._status()
        # The kernel's peak starts again here.
        Path("/proc/self/clear_refs").write_text("5")
        self.anonymous = self.file = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = self._status()["VmHWM"] - self._before["VmRSS"]

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            now = self._status()
            self.anonymous = max(self.anonymous, now["RssAnon"] - self._before["RssAnon"])
            self.file = max(self.file, now["RssFile"] - self._before["RssFile"])

    @staticmethod
    def _status() -> dict[str, int]:
        """In bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        pairs = (line.split(":", 1) for line in lines)
        return {
            k: int(v.split()[0]) * 1024 for k, v in pairs if k.startswith(("VmHWM", "VmRSS", "Rss"))
        }


def child(what: str, source: Path, output: Path) -> None:
    """One conversion; prints what it took."""
    if what == "write":
        write_run(source)
        return
    seconds = 0.0

    def silent(line: str) -> None:
        pass

    if what == "export":
        importlib.import_module("torch.distributed.checkpoint")  # which the export does late

        from megasink.convert import to_hf

        found = to_hf.source_of(source)
        with Memory() as memory:
            start = time.perf_counter()
            to_hf.export(found, output, say=silent)
            seconds = time.perf_counter() - start
    else:
        from megasink.cpu.prepare_process import prepare_process

        prepare_process("cpu")
        from megasink.convert import from_hf

        folder = from_hf.source_of(source)
        from_hf.arguments_of(from_hf.model_flags(folder.model))  # the imports that it does
        with Memory() as memory:
            start = time.perf_counter()
            from_hf.import_model(folder, output, say=silent)
            seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "seconds": seconds,
                "peak": memory.peak,
                "anonymous": memory.anonymous,
                "file": memory.file,
            }
        )
    )


def run_child(*words: object) -> dict[str, float]:
    """The figures of a process."""
    command = [sys.executable, __file__, "--child", *map(str, words)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1]) if output.strip() else {}


def copy(source: Path, output: Path) -> float:
    """Seconds of cp and sync of the files of a checkpoint."""
    output.mkdir()
    files = sorted(map(str, source.glob("*.distcp")))
    start = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", *files, str(output)], check=True)
    subprocess.run(["sync", *(str(path) for path in output.iterdir())], check=True)
    return time.perf_counter() - start


def ready(paths: list[Path], cold: bool) -> None:
    """The same caches before each measurement: none, or every byte of the sources."""
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def main() -> None:
    """Measure in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, source, output = args.child
        child(what, Path(source), Path(output))
        return
    folder = Path(tempfile.mkdtemp(prefix="convert-", dir=args.folder))
    try:
        measure(folder, args.repeats, args.cold)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, repeats: int, cold: bool) -> None:
    """All of it, in a folder."""
    run, hf = folder / "run", folder / "hf"
    checkpoint = run / "checkpoints" / "iter_0000001"
    run_child("write", run, run)
    shards = list(checkpoint.glob("*.distcp"))
    size = sum(path.stat().st_size for path in shards)
    fused = 2 * 2 * MODEL.ffn * MODEL.hidden
    table = 2 * MODEL.padded * MODEL.hidden
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    print(
        f"{size / 1e9:.2f} GB in {len(shards)} files (TP={TP} x PP={PP}), "
        f"{'cold' if cold else 'warm'} cache, {os.cpu_count()} cores, load {load}"
    )
    rounds: dict[str, list[dict[str, float]]] = {"cp + sync": [], "export": [], "import": []}
    for _ in range(repeats):
        ready(shards, cold)
        rounds["cp + sync"].append({"seconds": copy(checkpoint, folder / "copy")})
        shutil.rmtree(folder / "copy")
        shutil.rmtree(hf, ignore_errors=True)
        ready(shards, cold)
        rounds["export"].append(run_child("export", run, hf))
        ready(list(hf.glob("*.safetensors")), cold)
        rounds["import"].append(run_child("import", hf, folder / "back"))
        shutil.rmtree(folder / "back")
    base = statistics.median(r["seconds"] for r in rounds["cp + sync"])
    for name, found in rounds.items():
        seconds = statistics.median(r["seconds"] for r in found)
        text = f"{name:10} {size / 1e6 / seconds:7.0f} MB/s  {base / seconds:4.0%} of cp"
        if "peak" in found[0]:
            worst = {key: max(r[key] for r in found) / 1e6 for key in ("peak", "anonymous", "file")}
            text += "  memory +{peak:.0f} MB ({anonymous:.0f} anonymous, {file:.0f} file)".format(
                **worst
            )
        seen = ", ".join(f"{size / 1e6 / r['seconds']:.0f}" for r in found)
        print(f"{text}  [{seen}]", flush=True)
    print(
        f"largest tensors: linear_fc1 {fused / 1e6:.0f} MB, embedding {table / 1e6:.0f} MB; "
        f"allowed: twice + 200 MB = {2 * max(fused, table) / 1e6 + 200:.0f} MB"
    )


if __name__ == "__main__":
    main()
