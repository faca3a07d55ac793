"""Which weights the servers of a fleet must have: the fleet's, or on some of them a canary's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from skyctl.states import LIVE, TRAINER


@dataclass(frozen=True)
class FleetWeights:
    """The weights every routed server must have."""

    version: str | None = None
    """Their label; None is the base model."""
    checkpoint: str | None = None
    """Their directory, links resolved. None if they are in no file: a trainer sent them itself."""
    checkpoint_digest: str | None = None
    """The identity of its files when they were pushed."""
    transport: str = "auto"
    """How a server that restarts gets them."""
    content_digest: str = ""
    """Covers every byte that was pushed; "" if it was not computed."""
    draft: str = ""
    """The directory of the model that servers draft tokens with; "" if none was given."""
    draft_digest: str = ""
    """The identity of that model's files when they were pushed."""

    @classmethod
    def pushed(cls, push: Mapping[str, Any]) -> FleetWeights:
        """The weights of a finished push, from its result as JSON: bringing them to a server again
        needs no trainer.
        """
        again = "auto" if push["transport"] in (TRAINER, LIVE) else push["transport"]
        return cls(
            push["version"],
            push["checkpoint"] or None,
            push["checkpoint_digest"],
            again,
            push.get("content_digest") or "",
            push.get("draft") or "",
            push.get("draft_digest") or "",
        )


class CanaryStage(StrEnum):
    """What becomes of a canary."""

    STARTING = "starting"
    """It is pushed into its servers, which have the fleet's weights until that has succeeded."""
    SERVING = "serving"
    """Its servers serve it, and return to it when they restart."""
    ENDING = "ending"
    """Its servers return to the fleet's weights, and get no requests before they have them."""


@dataclass(frozen=True)
class Canary:
    """Another version than the fleet's on some of its servers, with a share of the requests."""

    weights: FleetWeights
    """What its servers serve; without a version until they do."""
    servers: tuple[str, ...]
    """Their names."""
    share: float
    """Of all requests, between 0 and 1."""
    stage: CanaryStage
    """What becomes of it."""
    began_at: float
    """When it was requested, or began to serve, in seconds since the epoch."""
    rollback_if: tuple[str, ...] = ()
    """What ends it, as written: `errors>1%` (`core/canary.py`)."""
    promote_after_s: float | None = None
    """How long it serves before it becomes the fleet's version; None: until that is requested."""
    counted: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each server had counted when it began to serve, and which process it was."""

    def serves_on(self, server: str) -> bool:
        """Whether this server is to serve it."""
        return self.stage is CanaryStage.SERVING and server in self.servers

    def serving(self, weights: FleetWeights) -> Canary:
        """The same, once its push has succeeded."""
        began = time.time()
        return replace(self, weights=weights, stage=CanaryStage.SERVING, began_at=began)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Canary:
        """From its fields as JSON."""
        return cls(
            **{
                **data,
                "weights": FleetWeights(**data["weights"]),
                "servers": tuple(data["servers"]),
                "stage": CanaryStage(data["stage"]),
                "rollback_if": tuple(data["rollback_if"]),
            }
        )
