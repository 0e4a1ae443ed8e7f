"""A checkpoint -> a Hugging Face folder: the same as `megasink convert-to-hf`, see --help."""

import sys

from megasink.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert-to-hf", *sys.argv[1:]]))
