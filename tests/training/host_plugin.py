"""A plugin that lets its host fail in some way, as the variable FAULT says."""

import os
import signal

from megasink.training import heartbeat, rank_phases


def fail(*_):
    if FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise RuntimeError("this host has a broken cable")


match FAULT := os.environ.get("FAULT"):
    case "early" | "stopped":
        heartbeat.record = fail
    case "late" | "killed":
        rank_phases.following_phases = fail  # the hosts have met
