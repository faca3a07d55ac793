"""A fleet's plan: exact argv, environment, ports and GPUs of each process."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import InstanceOf

from skyctl.engines import DEFAULT
from skyctl.engines.launches import (
    Device,
)
from skyctl.fleetfile.arguments import PlanWarning
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.base import Follower, Node

_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class ServerSpec:
    """Everything needed to start one server. On several machines, all but `world_size` is of its
    `node`.
    """

    name: str
    """Its name in the fleet."""
    argv: tuple[str, ...]
    """Its command line."""
    env: dict[str, str] = field(repr=False)
    """What is added to the inherited environment; it may hold the API key."""
    host: str
    """The address it binds."""
    port: int
    """0 where its node, and with it the port, is chosen only when it is started."""
    gpus: tuple[int, ...] = ()
    """Physical indices; empty on CPU."""
    world_size: int = 1
    """Its workers: tensor x pipeline x data parallel."""
    backend: str = ""
    """The weight-transfer backend it is started with; "" for none."""
    engine: str = DEFAULT
    """What it runs."""
    node: Node | None = None
    """The machine it runs on; None for this one."""
    role: str = ""
    """prefill or decode; "" for both."""
    followers: tuple[Follower, ...] = ()
    """Its parts on other machines."""
    master_port: int = 0
    """Where its followers meet it; 0 without any."""
    commits: dict[str, str] = field(default_factory=dict)
    """Commits in its command line, each with the revision that the fleet file asks for."""

    def as_written(self, argv: Sequence[str]) -> list[str]:
        """A command line with the fleet file's revisions: a pin does not change the plan."""
        words = list(argv)
        for commit, revision in self.commits.items():
            words = [word.replace(commit, revision) for word in words]
        return words

    @property
    def base(self) -> str:
        """The model that it is started with, as `locate` finds it; "" if it names none."""
        return _model_in(self.argv)

    @property
    def base_as_written(self) -> str:
        """The same with the fleet file's revision, which stays when the model is pinned later."""
        return _model_in(self.as_written(self.argv))

    @property
    def machines(self) -> str | None:
        """All that it runs on, as the user names them; None for this one."""
        if self.node is None:
            return None
        return ", ".join(node.target for node in self.nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The other machines that it runs on."""
        if self.node is None:
            return ()
        return (self.node, *(follower.node for follower in self.followers))

    @property
    def url(self) -> str:
        """URL clients on this machine use (a wildcard bind is reached over loopback)."""
        return local_url(self.host, self.port) if self.port else ""

    def to_json(self) -> dict[str, Any]:
        """All fields and `url`; secrets in `env` are masked."""
        return {
            "name": self.name,
            "role": self.role,
            "url": self.url or None,
            "host": self.host,
            "port": self.port,
            "node": self.machines,
            "gpus": list(self.gpus),
            "world_size": self.world_size,
            "backend": self.backend,
            "argv": list(self.argv),
            "env": masked(self.env),
            "followers": [
                {
                    "node": follower.node.target,
                    "gpus": list(follower.gpus),
                    "argv": list(follower.argv),
                    "env": masked(follower.env),
                }
                for follower in self.followers
            ],
        }


def _model_in(argv: Sequence[str]) -> str:
    """A directory, or `ORG/NAME@REVISION`; "" if there is none."""
    options = dict(itertools.pairwise(argv))
    model = options.get("--model", "")
    revision = options.get("--revision") if model and not Path(model).is_absolute() else None
    return f"{model}@{revision}" if revision else model


@dataclass(frozen=True)
class FrontSpec:
    """Everything needed to start what clients talk to instead of servers: the Tinker API."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    host: str
    port: int

    @property
    def url(self) -> str:
        return local_url(self.host, self.port)

    def to_json(self) -> dict[str, Any]:
        """All fields and `url`; secrets in `env` are masked."""
        return {"url": self.url, **vars(self), "argv": list(self.argv), "env": masked(self.env)}


@dataclass(frozen=True)
class RouterSpec(FrontSpec):
    """The router, but for the worker URLs appended at start."""

    metrics_port: int


@dataclass(frozen=True)
class FleetPlan:
    """A fleet ready to start."""

    name: str
    """Its name."""
    device: Device
    """Resolved: never `auto`."""
    model_path: str
    """Absolute, or a hub id."""
    served_model_name: str
    """The name that clients give the model."""
    servers: tuple[ServerSpec, ...]
    """In order."""
    router: RouterSpec | None
    """None where there is none."""
    config: FleetConfig
    """The fleet file that it was planned from."""
    warnings: tuple[InstanceOf[PlanWarning], ...] = field(default=())
    """What the user should know before it starts."""
    base_dir: Path = Path()
    """What the file's relative paths are relative to."""
    python: str = sys.executable
    """The interpreter of the servers."""
    free_gpus: tuple[int, ...] = ()
    """GPUs that the fleet may use and nothing of it does: a push's sender can run there."""
    tinker: FrontSpec | None = None
    """The Tinker API; None where there is none."""
    pins: dict[str, str] = field(default_factory=dict)
    """What the fleet's models mean while it is up (`core/pinning.py`)."""

    @property
    def base(self) -> str:
        """The model that servers are started with, as `locate` finds it: pinned, if it is here."""
        return (self.servers[0].base if self.servers else "") or self.model_path

    @property
    def warm_sender(self) -> dict[str, int]:
        """Bytes: `gpu_bytes` on each of its GPUs, `host_bytes` of the machine; zeros for none."""
        from skyctl.push.forecast import waiting_bytes

        gpu_bytes, host_bytes = 0, 0
        if self.config.warms and self.servers:
            gpu_bytes, host_bytes = waiting_bytes(self.servers[0].backend)
        return {"gpu_bytes": gpu_bytes, "host_bytes": host_bytes}

    def to_json(self) -> dict[str, Any]:
        """What `skyctl plan --json` prints. Secrets are replaced by `***`."""
        return {
            "name": self.name,
            "device": self.device,
            "model_path": self.model_path,
            "base": self.base,
            "served_model_name": self.served_model_name,
            "python": self.python,
            "base_dir": str(self.base_dir),
            "free_gpus": list(self.free_gpus),
            "warm_sender": self.warm_sender,
            "servers": [server.to_json() for server in self.servers],
            "router": None if self.router is None else self.router.to_json(),
            "tinker": None if self.tinker is None else self.tinker.to_json(),
            "warnings": list(self.warnings),
        }


def local_url(host: str, port: int) -> str:
    """URL of a server bound to `host`, as seen from this machine."""
    if host in _WILDCARDS:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the values of variables that are named like secrets replaced by `***`."""
    return {name: "***" if is_secret(name) else value for name, value in env.items()}


def is_secret(variable: str) -> bool:
    """Whether a variable is named like a secret."""
    return any(word in variable.upper() for word in _SECRET_WORDS)


def config_digest(config: FleetConfig) -> str:
    """Changes with every setting of a fleet file, and with nothing else in it; how many replicas
    run is no setting where load decides it.
    """
    without = {"replicas"} if config.scale else None
    return hashlib.sha256(config.model_dump_json(exclude=without).encode()).hexdigest()[:16]
