"""What makes a server ask for tokens: the argument that loads the guard, and its environment. Pure.

The guard is an ASGI middleware (`engines/vllm/inside/guard.py`). An interpreter named by `python:`
may not have skyctl: there the guard is found on PYTHONPATH, in a directory of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from skyctl.errors import UsageError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.store.credentials import API_KEY, AT_SPAWN, CONTROL_TOKEN

GUARD = "skyctl.engines.vllm.inside.guard.Guard"
GUARD_ALONE = "skyctl_guard.Guard"
ALONE = Path(__file__).with_name("inside") / "alone"


def guard_flags(config: FleetConfig) -> list[str]:
    """To come last on vLLM's command line: what is added last sees a request first."""
    if config.auth == "none":
        return []
    return ["--middleware", GUARD_ALONE if config.python else GUARD]


def guard_env(
    config: FleetConfig, env: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """What to add to a server's `env`; secrets that skyctl makes itself are still to be filled in.

    `environ` is the environment it inherits, where the fleet's own API key may be.

    Raises:
        UsageError: the variable that `api_key_env` names is not set.
    """
    added: dict[str, str] = {}
    key = _own_api_key(config, environ)
    if key is not None:
        added[API_KEY] = key
    elif config.auth == "all":
        added[API_KEY] = AT_SPAWN
    if config.auth != "none":
        added[CONTROL_TOKEN] = AT_SPAWN
        if config.python:
            before = env.get("PYTHONPATH", environ.get("PYTHONPATH", ""))
            added["PYTHONPATH"] = os.pathsep.join([str(ALONE), before] if before else [str(ALONE)])
    return added


def _own_api_key(config: FleetConfig, environ: Mapping[str, str]) -> str | None:
    name = config.api_key_env
    if name is None:
        return None
    if not environ.get(name):
        raise UsageError(
            f"the fleet's API key is not set: api_key_env names {name}",
            hint=f"export {name}=…",
        )
    return environ[name]
