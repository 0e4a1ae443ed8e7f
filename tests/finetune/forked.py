"""``megasink finetune`` in a forked process: without Megatron's platform, which shows a GPU.

What it imports is imported before the fork.
"""

import os
import sys

import trl  # noqa: F401
from peft import LoraConfig  # noqa: F401
from transformers import Qwen3ForCausalLM  # noqa: F401
from trl import SFTTrainer  # noqa: F401

from megasink import cpu
from megasink.__main__ import run

if __name__ == "__main__":
    if cpu.is_active():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as where it was activated
        cpu.deactivate()
    sys.argv[0] = "megasink"
    sys.exit(run())
