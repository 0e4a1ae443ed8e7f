"""Join the parts of a data set made by several machines (`--partition`)."""

import json
import re
import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megasink.console.progress import progress
from megasink.data import dataset_files
from megasink.data.corpus import EXAMPLES
from megasink.data.indexed_dataset import data_problem, sequence_lengths, write_index
from megasink.errors import ConfigError

_SUMS = ("documents", "tokens", "text_bytes")


def merge(prefix: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Join `PREFIX-1-of-N` ... `PREFIX-N-of-N`, which stay, to `PREFIX`; return its .json."""
    # The bytes are those of a run without --partition, but for the sources of skipped documents.
    prefix = Path(prefix)
    problems = dataset_files.output_problems(prefix, [], overwrite=overwrite)
    parts = _parts(prefix, problems)
    sidecars = [dataset_files.read_sidecar(str(part)) for part in parts]
    if not problems:
        problems += _differences(parts, sidecars)
    if problems:
        raise ConfigError(problems)
    if dataset_files.KEY in sidecars[0]:
        merge(dataset_files.validation_of(prefix), overwrite=overwrite)
    with dataset_files.writing(prefix):
        dataset_files.clear_partial(prefix)
        _join(prefix, parts, sidecars[0]["dtype"])
        sidecar = dataset_files.write_sidecar(prefix, _sum_of(sidecars))
        dataset_files.publish(prefix)
    return sidecar


def _parts(prefix: Path, problems: list[str]) -> list[Path]:
    """Return the parts in order; append what is missing to `problems`."""
    form = re.compile(re.escape(prefix.name) + r"-(\d+)-of-(\d+)\.idx")
    names = (path.name for path in prefix.parent.glob("*.idx"))
    counts = sorted({int(match[2]) for name in names if (match := form.fullmatch(name))})
    if len(counts) != 1:
        what = f"parts of {' and of '.join(map(str, counts))}" if counts else "no part"
        problems.append(
            f"{prefix}: found {what}: make all parts with megasink data --partition and the same "
            f"number of parts ({dataset_files.part_of(prefix, 1, 8)} and so on)"
        )
        return []
    prefixes = [dataset_files.part_of(prefix, part, counts[0]) for part in range(1, counts[0] + 1)]
    missing = [str(p) for p in prefixes if not dataset_files.file_of(p, ".idx").is_file()]
    if missing:
        problems.append(f"missing parts: {', '.join(missing)}")
    return prefixes


def _differences(parts: list[Path], sidecars: list[dict[str, Any]]) -> list[str]:
    """Return damage, and differences from the first part."""
    problems = [f"{p}: {text}" for p in parts if (text := data_problem(str(p), None))]
    own = {*_SUMS, "largest_id", "skipped", "partition", dataset_files.CHECKSUMS}
    for number, (part, sidecar) in enumerate(zip(parts, sidecars, strict=True), 1):
        if sidecar.get("partition") != [number, len(parts)]:
            problems.append(f"{part}.json does not describe part {number}/{len(parts)}")
            continue
        for key in sorted((set(sidecar) | set(sidecars[0])) - own):
            if sidecar.get(key) != sidecars[0].get(key):
                problems.append(
                    f"{part} differs from {parts[0]} in {key}: "
                    f"{json.dumps(sidecar.get(key))}, not {json.dumps(sidecars[0].get(key))}"
                )
    return problems


def _join(prefix: Path, parts: list[Path], dtype: str) -> None:
    sizes = [dataset_files.file_of(part, ".bin").stat().st_size for part in parts]
    with (
        progress("merging", sum(sizes), "bytes") as tell,
        dataset_files.partial_of(prefix, ".bin").open("xb") as file,
    ):
        for part, done in zip(parts, accumulate(sizes), strict=True):
            with dataset_files.file_of(part, ".bin").open("rb") as content:
                shutil.copyfileobj(content, file, 16 << 20)
            tell(done)
    lengths = [sequence_lengths(str(part)) for part in parts]
    there = [part for part in lengths if part is not None]
    write_index(dataset_files.partial_of(prefix, ".idx"), there, np.dtype(dtype))


def _sum_of(sidecars: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sidecar that a run without parts would have."""
    merged = {key: value for key, value in sidecars[0].items() if key != "partition"}
    for key in _SUMS:
        if key in merged:
            merged[key] = sum(sidecar[key] for sidecar in sidecars)
    merged["largest_id"] = max(sidecar["largest_id"] for sidecar in sidecars)
    skipped = [sidecar["skipped"] for sidecar in sidecars]
    merged["skipped"] = {
        key: sum(one[key] for one in skipped) for key in skipped[0] if key != "examples"
    } | {"examples": [source for one in skipped for source in one["examples"]][:EXAMPLES]}
    return merged
