"""``megasink plan``: estimate memory and communication of a run, without its GPUs."""

from megasink.plan.run_plan import main

__all__ = ["main"]
