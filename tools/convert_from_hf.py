"""A Hugging Face folder -> a run: the same as `megasink convert-from-hf`, see --help."""

import sys

from megasink.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert-from-hf", *sys.argv[1:]]))
