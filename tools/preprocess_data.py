"""Tokenize text for Megatron: the same as `megasink data`, see --help."""

import sys

from megasink.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", *sys.argv[1:]]))
