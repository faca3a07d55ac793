"""The Tinker API as a process of the fleet: its command line, and what it needs on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from skyctl.errors import SkyctlError

MODULES = ("google.protobuf", "zstandard", "numpy", "torch", "transformers", "safetensors")
INSTALL = "pip install 'skyctl-fleet[tinker]'"


@dataclass(frozen=True)
class TinkerSettings:
    """All that the API process is told. `storage` None is the fleet's own directory; `context` is
    how many tokens a server takes, prompt and answer, None if only the model says so.

    It asks its supervisor for its endpoint, once. `entry` (its URL), `served_model_name` and
    `key_source` (a variable, a file or none) are included so that a change of them restarts it.
    """

    fleet: str
    model: str
    base_model: str
    host: str
    port: int
    storage: str | None
    device: str
    dtype: str
    threads: int
    batch_tokens: int
    gradient_checkpointing: bool
    max_rank: int
    full_parameters: bool
    max_body: int
    max_adapters: int
    context: int | None
    entry: str
    served_model_name: str
    key_source: str | None

    def argument(self) -> str:
        """The settings as one word of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_argument(cls, text: str) -> Self:
        """Inverse of `argument`."""
        return cls(**json.loads(text))


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
