"""What the servers of a fleet want to be told: from files of its own, or from the environment."""

from __future__ import annotations

import os
from pathlib import Path

from skyctl.core.urls import Access
from skyctl.store.credentials import read_secret


def api_key(access: Access) -> str | None:
    """The key of inference. Raises SkyctlError when its file is not ours alone."""
    return _secret(access.api_key_env, access.api_key_file)


def control_token(access: Access) -> str | None:
    """The token of the control routes; where they have none of their own, the key of inference.

    Raises:
        SkyctlError: its file is not ours alone.
    """
    return _secret(access.control_token_env, access.control_token_file) or api_key(access)


def _secret(variable: str | None, file: str | None) -> str | None:
    if variable:
        return os.environ.get(variable)
    return read_secret(Path(file)) if file else None
