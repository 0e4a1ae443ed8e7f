"""Every test process imports this first."""

import math
import os
import signal
import sys

import megasink.console.progress

# A shell that starts something in the background, and nohup, have it ignore signals, and so would
# everything that the tests start and send them to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Images of containers often set it. Without bytecode every process compiles torch, transformers and
# Megatron anew, which takes three times as long as to import them.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# On a slow machine commands would say soon how far they are, between the lines that a test expects.
megasink.console.progress._FIRST_SECONDS = math.inf
