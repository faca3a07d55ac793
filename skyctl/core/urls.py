"""Where a fleet is reached: the router for generation, every server for control and metrics; and
the keys they require.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.store.credentials import read_secret

if TYPE_CHECKING:
    from skyctl.fleetfile.schema import FleetConfig
    from skyctl.store.paths import FleetPaths


@dataclass(frozen=True)
class Access:
    """Where the secrets are that the servers require; never the secrets themselves.

    At most one of `api_key_env` (a variable) and `api_key_file` is set; none if inference needs no
    key. The control routes require what is in `control_token_file`, or in the variable
    `control_token_env` if another skyctl started the servers.
    """

    api_key_env: str | None = None
    api_key_file: str | None = None
    control_token_env: str | None = None
    control_token_file: str | None = None


def access(config: FleetConfig, paths: FleetPaths) -> Access:
    """What the fleet file requires of clients."""
    if config.attached:
        key = config.api_key_env or config.control_token_env
        return Access(api_key_env=key, control_token_env=config.control_token_env)
    own_key = config.api_key_env is None and config.auth == "all"
    return Access(
        api_key_env=config.api_key_env,
        api_key_file=str(paths.api_key) if own_key else None,
        control_token_file=str(paths.control_token) if config.auth != "none" else None,
    )


@dataclass(frozen=True)
class FleetUrls:
    """URLs without a trailing slash. `model` is the name to put into requests, None if unknown;
    `router_metrics` is the URL of the router's Prometheus page; `engine` is the servers' engine.
    """

    name: str
    model: str | None
    router: str | None
    servers: Mapping[str, str]
    router_metrics: str | None = None
    access: Access = Access()
    engine: str = "vllm"

    @property
    def entry(self) -> str | None:
        """Where requests go: the router, or the first server of a fleet without one."""
        return self.router or next(iter(self.servers.values()), None)

    def to_json(self) -> dict[str, Any]:
        """What `skyctl urls --json` prints."""
        return {
            "model": self.model,
            "router": self.router,
            "servers": dict(self.servers),
            "access": asdict(self.access),
        }


def api_key(access: Access) -> str | None:
    """The key for inference. Raises SkyctlError if others can access its file."""
    return _secret(access.api_key_env, access.api_key_file)


def control_token(access: Access) -> str | None:
    """The token of the control routes; the inference key if they have none of their own.

    Raises:
        SkyctlError: others can access its file.
    """
    return _secret(access.control_token_env, access.control_token_file) or api_key(access)


def _secret(variable: str | None, file: str | None) -> str | None:
    if variable:
        return os.environ.get(variable)
    return read_secret(Path(file)) if file else None
