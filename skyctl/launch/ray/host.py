"""Servers on the nodes of a Ray cluster as a `Host`: as over ssh, with drivers to be reaped."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

import psutil

from skyctl.launch.ray.client import DRIVERS_NAME
from skyctl.launch.remote.host import SSH


def reap_drivers() -> None:
    """Wait for those drivers that are children of ours since their first client ended, and have
    ended: while a cluster lets no client in, there is one for each attempt.
    """
    with suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name() == DRIVERS_NAME:
                    os.waitpid(child.pid, os.WNOHANG)


RAY = replace(SSH, name="ray", reap=reap_drivers)
