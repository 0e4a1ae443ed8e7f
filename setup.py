"""The entry of older tools; everything that is said about the package is in pyproject.toml."""

from setuptools import setup

setup()
