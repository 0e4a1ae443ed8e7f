"""What benchmarks/gpu.py reports: the machine, and report.md beside report.json."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from megasink.files.atomic import atomic_text
from megasink.upstream.versions import version_of

PACKAGES = (
    *("torch", "triton", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-4"),
    *("apex", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "megasink"),
)


def facts() -> dict[str, Any]:
    """Return what results depend on: commit, devices, driver and versions, as JSON values.

    `devices` is empty without a usable GPU; `no_device` then says why.
    """
    import torch

    from megasink import cpu

    present = cpu.cuda_present()
    devices = [
        {
            "name": torch.cuda.get_device_name(index),
            "capability": list(torch.cuda.get_device_capability(index)),
            "GiB": round(torch.cuda.get_device_properties(index).total_memory / 2**30, 1),
        }
        for index in range(torch.cuda.device_count() if present else 0)
    ]
    return {
        "commit": _output("git", "rev-parse", "HEAD"),
        "sources": _digest(),
        "changes": _output("git", "status", "--short", "--untracked-files=no"),
        "devices": devices,
        "no_device": None if present else cpu.unusable_gpu() or "there is no CUDA device",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def _digest() -> str:
    """Return a digest of the files that results depend on. A machine may have no git."""
    made_from = hashlib.sha256()
    root = Path(__file__).parents[1]
    for room in ("benchmarks", "megasink", "tests/attention", "tests/gpu"):
        for path in sorted((root / room).rglob("*.py")):
            made_from.update(path.read_bytes())
    return made_from.hexdigest()[:16]


def _output(*command: str) -> str:
    """Return what a command prints, or "unknown" where it is missing or fails."""
    try:
        here = Path(__file__).parent
        result = subprocess.run(command, cwd=here, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.md."""
    atomic_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    atomic_text(folder / "report.md", "\n".join(_markdown(report, folder)) + "\n")


def _markdown(report: dict[str, Any], folder: Path) -> list[str]:
    machine = report["machine"]
    names = sorted({device["name"] for device in machine["devices"]})
    lines = ["# megasink on a GPU", ""]
    lines += [f"- {len(machine['devices'])} x {', '.join(names)}; driver {machine['driver']}"]
    lines += [
        f"- CUDA {machine['cuda']}; commit {machine['commit'][:12]}, sources {machine['sources']}"
    ]
    if machine["changes"]:
        lines += ["- **with uncommitted changes**"]
    lines += ["- " + ", ".join(f"{name} {v}" for name, v in machine["versions"].items()), ""]
    lines += ["| part | state | s | |", "|---|---|---|---|"]
    for part in report["parts"]:
        result = part["result"]
        detail = result["detail"].replace("|", "\\|")
        title = f"[{part['title']}]({part['name']}.log)"
        lines += [f"| {title} | {result['state']} | {result['seconds']:.0f} | {detail} |"]
    for part in report["parts"]:
        if part["tables"] and part["result"]["state"] != "skipped":  # also before a failure
            text = (folder / f"{part['name']}.log").read_text(errors="replace")
            tables = [line for line in text.splitlines() if line.startswith("|") or not line]
            lines += ["", f"## {part['title']}", "", *tables]
        pictures = sorted((folder / part["name"]).glob("*.png"))
        lines += [f"![{part['title']}]({part['name']}/{picture.name})" for picture in pictures]
    return lines
