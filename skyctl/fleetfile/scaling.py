"""The `scale` section of a fleet file: bounds and target of the number of replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from skyctl.fleetfile.sections import Section
from skyctl.fleetfile.values import Replicas, Seconds, real_number

Target = Literal["queue", "kv", "tokens"]
_VALUES: dict[Target, float] = {"queue": 32.0, "kv": 0.8}
_INTERVAL_S = 5.0


class ScaleSection(Section):
    """Let the load decide how many replicas run."""

    min: Replicas = Field(1, description="Fewest replicas.")
    max: Replicas = Field(description="Most replicas; they divide GPUs and cores.")
    target: Target = Field(
        "queue",
        description="Of a replica: its requests, used share of its KV cache, tokens per second.",
    )
    value: Seconds | None = Field(
        None, description="How much each is to have at most (queue: 32, kv: 0.8)."
    )
    up_after_s: Seconds = Field(15.0, description="Seconds of more before replicas are added.")
    down_after_s: Seconds = Field(
        300.0,
        description="Seconds of too little for all, by a fifth, before one is removed.",
    )
    sleep_s: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(real_number)] = (
        Field(
            600.0,
            description="Seconds that a removed replica sleeps, and can be woken.",
        )
    )

    @property
    def per_replica(self) -> float:
        """`value`, or its default for the target."""
        return _VALUES[self.target] if self.value is None else self.value

    @property
    def interval_s(self) -> float:
        """Seconds between two samples at the load."""
        return min(_INTERVAL_S, self.up_after_s / 3)

    @model_validator(mode="after")
    def _bounded(self) -> ScaleSection:
        if self.min > self.max:
            raise ValueError(f"`scale: min` is {self.min}, and `max` {self.max}")
        if self.value is None and self.target not in _VALUES:
            raise ValueError(
                "`scale: {target: tokens}` needs `value`, the tokens per second of a busy server: "
                "it depends on the model"
            )
        if self.target == "kv" and self.per_replica > 1:
            raise ValueError("`scale: {target: kv}` is a share: write `value: 0.8` for 80 %")
        return self

    def refusal(self, replicas: int) -> str:
        """Why a fleet may not have this many replicas, or ""."""
        if self.min <= replicas <= self.max:
            return ""
        return f"`scale:` in the fleet file says {self.min} to {self.max} replicas"
