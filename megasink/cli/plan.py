"""``megasink plan``: estimate memory and communication of a run, without its GPUs."""

from megasink.plan.launch import main

__all__ = ["main"]
