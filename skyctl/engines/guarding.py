"""The settings of the guard that runs inside a server (`inside/guard.py`). Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from skyctl.engines.launches import ServerLaunch
from skyctl.store.credentials import CONTROL_TOKEN

ALONE = Path(__file__).with_name("inside") / "alone"
"""On the import path of servers whose interpreter may not have skyctl."""


def guard_environment(
    launch: ServerLaunch, env: Mapping[str, str], key_variable: str
) -> dict[str, str]:
    """The guard's environment. An interpreter named by `python:` may not have skyctl: there the
    guard is found on PYTHONPATH, in a directory of its own.
    """
    added: dict[str, str] = {}
    access = launch.access
    if access.api_key is not None:
        added[key_variable] = access.api_key
    elif access.auth == "all":
        added[key_variable] = access.secret
    if access.auth != "none":
        added[CONTROL_TOKEN] = access.secret
    if not launch.own_python:
        before = env.get("PYTHONPATH", launch.environ.get("PYTHONPATH", ""))
        added["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ALONE), before)))
    return added
