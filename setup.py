"""Packaging of megasink; the settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "megasink/__init__.py").read_text())
assert VERSION is not None

setup(
    name="megasink",
    version=VERSION.group(1),
    description="Sink and gated attention with head balancing for Megatron-Core",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megasink", "megasink.*"]),
    package_data={"megasink": ["py.typed"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.19,<0.20",
        "numpy",
        "transformers>=5",
        "sentencepiece",
        "tokenizers",
        "tensorboard",
        "psutil",  # Megatron's asynchronous checkpoint workers import it
        "rich",
        "matplotlib",
        "pyarrow",  # parquet corpora
        "zstandard",  # .jsonl.zst corpora
    ],
    extras_require={
        # flash-attn 2 and 3 are source builds; flash-attn-4 is a pure Python wheel.
        "gpu": ["transformer-engine[pytorch]>=2.9", "flash-attn-4"],
        "analysis": ["scipy", "scikit-learn"],
        "dev": ["pytest", "pytest-timeout", "ruff", "mypy"],
    },
    entry_points={"console_scripts": ["megasink = megasink.cli:main"]},
)
