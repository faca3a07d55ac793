"""What the servers of a fleet want to be told: from files of its own, or from the environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from skyctl.store.credentials import read_secret

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef


def api_key(ref: FleetRef) -> str | None:
    """The key of inference: from the variable that `api_key_env` names, else the fleet's own file.

    Raises:
        SkyctlError: the file is not ours alone.
    """
    name = ref.config.api_key_env
    if name:
        return os.environ.get(name)
    if ref.config.attached:
        return control_token(ref)
    return read_secret(ref.paths.api_key) if ref.config.auth == "all" else None


def control_token(ref: FleetRef) -> str | None:
    """The token of the control routes: from the fleet's own file, or, for servers that this skyctl
    did not start, from the variable that `control_token_env` names.

    Raises:
        SkyctlError: the file is not ours alone.
    """
    if ref.config.attached:
        name = ref.config.control_token_env
        return os.environ.get(name) if name else None
    return read_secret(ref.paths.control_token) if ref.config.auth != "none" else None
