"""Pure planning: a fleet's configuration becomes exact argv, environment, ports and GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skyctl.fleet.schema import FleetConfig


@dataclass(frozen=True)
class ServerSpec:
    """Everything needed to start one vLLM server.

    `env` holds only what is added to the inherited environment. `world_size` counts its workers:
    tensor x pipeline x data parallel. `gpus` are physical indices, empty on CPU. `backend` is the
    weight-transfer backend the server is started with, or "" for none.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    host: str
    port: int
    gpus: tuple[int, ...] = ()
    world_size: int = 1
    backend: str = ""

    @property
    def url(self) -> str:
        """URL clients on this machine use (a wildcard bind is reached over loopback)."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class RouterSpec:
    """Everything needed to start the router, but for the worker URLs appended at start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    host: str
    port: int
    metrics_port: int

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class FleetPlan:
    """A fleet ready to start. `device` is resolved; `model_path` is absolute or a hub id."""

    name: str
    device: Literal["cpu", "cuda"]
    model_path: str
    served_model_name: str
    servers: tuple[ServerSpec, ...]
    router: RouterSpec | None
    config: FleetConfig
    warnings: tuple[str, ...] = field(default=())
    base_dir: Path = Path()

    def to_json(self) -> dict[str, Any]:
        """What `skyctl plan --json` prints. Secrets are replaced by `***`."""
        raise NotImplementedError
