"""The parts of ``make gpu``, in the order in which benchmarks/gpu.py runs them."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The kernels of CUDA devices, and the modules of each.
KERNELS = {
    "flash-cuda": (),
    "cudnn": (),
    "flash-attn-4": ("flash_attn.cute",),
    "transformer-engine": ("transformer_engine",),
    "flash-attn-3": ("flash_attn_interface",),
    "flash-attn-2": ("flash_attn.flash_attn_interface",),
}


@dataclass(frozen=True)
class Part:
    """One process of the report.

    Attributes:
        name: Name of its log and its folder.
        title: Heading in the report.
        command: What Python runs; "{folder}" stands for the part's own folder.
        limit: Seconds until it is stopped.
        gpus: GPUs that it needs.
        tables: Whether its output is Markdown, which goes into the report whole.
        needs: Modules without which it is skipped.
    """

    name: str
    title: str
    command: tuple[str, ...]
    limit: int
    gpus: int = 1
    tables: bool = False
    needs: tuple[str, ...] = ()


def _tests(*names: str, kernel: str = "", hang: int = 90) -> tuple[str, ...]:
    """Run files of tests without the settings of the whole suite, which needs more packages.

    A test that takes `hang` seconds (0: any time) is stopped, and the others go on.
    """
    options = ("-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, f"--rootdir={ROOT}")
    part = ("-p", "tests.gpu.parts", "--passed", "{folder}.passed", f"--hang={hang}")
    part += ("--running", "{folder}/running")
    part += ("--kernel", kernel) if kernel else ()
    return ("-m", "pytest", "-q", *options, *part, *(f"tests/gpu/{name}" for name in names))


def _benchmark(name: str, *flags: str) -> tuple[str, ...]:
    return (f"benchmarks/{name}.py", *flags)


_ATTENTION = ("test_attention_gpu.py", "test_edges_gpu.py")
_TRAIN = ("pytest", "megatron.training", "pydantic", "rich", "psutil", "sentencepiece")


def _kernel(name: str) -> Part:
    return Part(
        f"kernel-{name}",
        f"Tests: {name} against float64",
        _tests(*_ATTENTION, kernel=name),
        180,
        needs=("pytest", *KERNELS[name]),
    )


# In the order of their worth, since a machine may be lent for ten minutes: the kernels that run on
# any GPU, their errors, and the ratios of README.md (3 minutes expected on an H200), then other
# kernels, layers, whole jobs. Expected seconds are those of an H200 with cold caches; a part whose
# packages are missing takes none.
PARTS = (
    Part(
        "environment",  # 10 s
        "Versions, kernels",
        ("-m", "megasink", "doctor", "--no-self-test"),
        60,
        needs=("rich", "packaging"),
    ),
    _kernel("flash-cuda"),  # 45 s
    Part(
        "gates",  # 30 s
        "Tests: Triton gate kernels",
        _tests("test_gate_kernels_gpu.py"),
        90,
        needs=("pytest", "triton"),
    ),
    Part(
        "errors",  # 10 s
        "Gradient errors against float64",
        _benchmark("attention_error", "--device", "cuda"),
        60,
        tables=True,
    ),
    Part(
        "attention",  # 80 s, most of it FlexAttention's compiler
        "Attention against the plain kernel",
        _benchmark(
            "attention",
            *("--device", "cuda", "--heads", "16", "--head-dim", "128"),
            *("--lengths", "1024", "4096", "8192", "16384", "--output", "{folder}"),
        ),
        200,
        tables=True,
    ),
    _kernel("cudnn"),  # 30 s; 5 s before cuDNN 9.26, with which it is refused
    _kernel("flash-attn-4"),  # 150 s, most of it its compiler
    Part(
        "layers",  # 50 s
        "Tests: Megatron's layers and steps",
        _tests("test_layers_gpu.py", hang=0),
        120,
        needs=("pytest", "megatron.core", "pydantic"),
    ),
    Part(
        "step",  # 40 s
        "Training step of the 0.6B shape",
        _benchmark("step_time", "--device", "cuda"),
        90,
        tables=True,
        needs=("megatron.training", "pydantic"),
    ),
    Part(
        "other",  # 60 s, most of it torch.compile
        "Tests: eager, the choice of kernels",
        _tests(*_ATTENTION, kernel="none"),
        120,
        needs=("pytest",),
    ),
    Part(
        "job",  # 150 s
        "Tests: train, resume, export, generate, analyze",
        _tests("test_job_gpu.py", hang=0),
        300,
        needs=(*_TRAIN, "scipy", "sklearn", "matplotlib"),
    ),
    *(_kernel(name) for name in ("transformer-engine", "flash-attn-3", "flash-attn-2")),
    Part(
        "ranks", "Tests: NCCL ranks", _tests("test_ranks_gpu.py", hang=0), 120, gpus=2, needs=_TRAIN
    ),
    Part(
        "doctor",  # 40 s, most of it a job of its own
        "Patches, and the self-test",
        ("-m", "megasink", "doctor"),
        90,
        needs=("rich", "packaging"),
    ),
)
