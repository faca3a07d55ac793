"""What a fleet came up with: recorded before its servers start, and required of each that starts.

A name of a model does not say which weights it has: a branch on the hub moves, and a directory is
overwritten. The record ends with the fleet's run (`FleetState.forget_run`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from skyctl.store.state import BASE_KEY, FleetState


@dataclass(frozen=True)
class BaseFiles:
    """The files of a checkpoint that servers are started with, as far as they are local."""

    shards: str = ""
    """Names their bytes (`store/expected.py`); "" if they are not known."""
    settings: str = ""
    """Digest of configuration, tokenizer and chat template; "" if they are not known."""

    def unless_changed(self, before: BaseFiles | None) -> BaseFiles | None:
        """What is as it was `before`; None if nothing was there."""
        if before in (None, BaseFiles()):
            return None
        return BaseFiles(
            self.shards if before.shards == self.shards else "",
            self.settings if before.settings == self.settings else "",
        )


@dataclass(frozen=True)
class BaseWeights:
    """What servers that are started with one model hold before the first push."""

    files: BaseFiles = field(default_factory=BaseFiles)
    """The model's files when the fleet came up."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the servers that were admitted first, by engine and arrangement."""


def base_weights(state: FleetState) -> dict[str, BaseWeights]:
    """What is on record, by model (`ServerSpec.base_as_written`)."""
    with state.understanding():
        return {
            model: BaseWeights(BaseFiles(**data["files"]), data["digests"])
            for model, data in json.loads(state.get(BASE_KEY) or "{}").items()
        }


def record_base(state: FleetState, bases: Mapping[str, BaseWeights]) -> None:
    """Replace what is on record."""
    state.set(BASE_KEY, json.dumps({model: asdict(base) for model, base in bases.items()}))


def learn_base(state: FleetState, model: str, place: str, digest: str) -> None:
    """A server was admitted with this digest; the first of an engine and arrangement counts."""
    bases = base_weights(state)
    base = bases.get(model, BaseWeights())
    if place not in base.digests:
        bases[model] = replace(base, digests={**base.digests, place: digest})
        record_base(state, bases)
