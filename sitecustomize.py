import os

if os.environ.get("MEASURE_STARTS"):
    with open(os.environ["MEASURE_STARTS"], "a") as f:
        f.write("x")
    import sys

    with open(os.environ["MEASURE_STARTS"] + ".argv", "a") as f:
        f.write(repr(sys.orig_argv)[:300] + "\n")
