"""A stub's answer to whether a checkpoint fits its model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.checkpoints.configs import usual_spelling

if TYPE_CHECKING:
    from tests.stub.state import StubEngine


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a model, as of now; {} for one that has none."""
    with suppress(OSError, ValueError):
        found = json.loads((Path(model) / "config.json").read_text())
        return found if isinstance(found, dict) else {}
    return {}


def answer(
    engine: StubEngine, config: Mapping[str, Any], tensors: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """As a worker answers that transformers tells the defaults of `usual_spelling`."""
    both = {"running": engine.config or config, "pushed": config}
    spelled = {name: usual_spelling({**one, **engine.hf_overrides}) for name, one in both.items()}
    uses = ["ignored" if name in engine.ignored else "loaded" for name, *_ in tensors]
    return {**spelled, "uses": uses, "ties_output": engine.ties_output}


def draft_uses(engine: StubEngine, tensors: Sequence[Sequence[Any]]) -> list[str]:
    """What its draft model takes."""
    taken = [str(name).startswith(engine.draft_takes) for name, *_ in tensors]
    return ["loaded" if takes else "ignored" for takes in taken]
