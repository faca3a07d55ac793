"""The Tinker API as a process of the fleet: its command line, and what it needs on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from skyctl.errors import SkyctlError
from skyctl.launch.base import Node
from skyctl.store.paths import expanded

MODULES = ("google.protobuf", "zstandard", "numpy", "torch", "transformers", "safetensors")
INSTALL = "pip install 'skyctl-fleet[tinker]'"
LABEL_PREFIX = "tinker-"
"""Names of adapters and labels of pushed models that the API put on the servers begin with it."""


@dataclass(frozen=True)
class TinkerSettings:
    """All that the API process is given. It asks its supervisor for its endpoint, once; a change of
    `entry`, `served_model_name` or `key_source` restarts it.
    """

    fleet: str
    """The name of the fleet."""
    model: str
    """What is trained: a directory or a hub id."""
    base_model: str
    """The name that clients give it."""
    host: str
    """The address it binds."""
    port: int
    """Where it listens."""
    storage: str | None
    """Where it keeps checkpoints; None is the fleet's own directory."""
    devices: Sequence[str]
    """Where it trains, a rank on each."""
    machine: Mapping[str, Any] | None
    """The fields of the `Node` that it trains on; None for this machine."""
    shard_base: bool | None
    """Whether ranks shard the base; None: as a GPU's memory allows."""
    dtype: str
    """In which type it trains."""
    threads: int
    """Of each rank; 0 leaves that to torch."""
    batch_tokens: int
    """The most tokens of one pass."""
    gradient_checkpointing: bool
    """Whether activations are computed again to save memory."""
    max_rank: int
    """The largest rank of an adapter."""
    full_parameters: bool
    """Whether all parameters may be trained."""
    join_requests: bool
    """Whether requests of a model that wait together are computed at once."""
    open_models: int
    """The most models on the device."""
    parked_memory: int
    """Bytes of host memory for further adapters."""
    keep_runs_s: float
    """Seconds that a run is kept without a heartbeat of its client."""
    keep_samplers: int
    """How many unnamed adapters of a model are kept for samplers."""
    keep_samplers_s: float
    """Seconds that one is kept after its last use."""
    max_body: int
    """The most bytes of a request."""
    max_adapters: int
    """The most adapters that are served at once."""
    context: int | None
    """How many tokens a server takes, prompt and answer; None if only the model says so."""
    entry: str
    """The URL where it sends requests."""
    served_model_name: str
    """The name that servers give the model."""
    key_source: str | None
    """A variable or a file that has the key of the servers; None if they ask for none."""

    @property
    def node(self) -> Node | None:
        """The machine that it trains on; None for this one."""
        if self.machine is None:
            return None
        return Node(**{**self.machine, "command": tuple(self.machine["command"])})

    def argument(self) -> str:
        """The settings as one word of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_argument(cls, text: str) -> Self:
        """Inverse of `argument`."""
        return cls(**json.loads(text))


def storage_directory(storage: str | None, base_dir: Path) -> Path | None:
    """The directory that `tinker: storage` means; None is the fleet's own."""
    return (base_dir / expanded(storage)).resolve() if storage else None


def longest(args: Mapping[str, Any]) -> int | None:
    """`max-model-len` of a server's arguments, if it is a number."""
    lengths = (v for k, v in args.items() if k.lstrip("-").replace("_", "-") == "max-model-len")
    return next((int(value) for value in lengths if str(value).isdigit()), None)


def context_of(model: str) -> int:
    """The context length of a model, in tokens, by its configuration.

    Raises:
        SkyctlError: the configuration does not say.
    """
    with suppress(OSError, ValueError):
        config = json.loads((Path(model) / "config.json").read_bytes())
        length = config.get("text_config", config).get("max_position_embeddings")
        if isinstance(length, int):
            return length
    raise SkyctlError(
        f"how many tokens {model} takes is not known", hint="write max-model-len under `args:`"
    )
