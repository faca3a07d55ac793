"""What a group of fleets that share their GPUs rules out in a fleet file."""

from __future__ import annotations

from collections.abc import Mapping

from skyctl.engines import ENGINES
from skyctl.engines.base import Feature

_EXCLUDED = {
    "servers": "skyctl must have started what it puts to sleep",
    "scale": "load would start servers beside those of another fleet",
    "tinker": "it samples while it trains",
}


def check_sleep_group(engine: str, launcher: str, sections: Mapping[str, object]) -> None:
    """Raise ValueError if a fleet with these sections cannot sleep while another has its GPUs."""
    for key, reason in _EXCLUDED.items():
        if sections[key] is not None:
            raise ValueError(f"`sleep_group` does not go with `{key}`: {reason}")
    if launcher == "ray":
        raise ValueError("`sleep_group` does not go with `launcher: ray`: Ray shares no GPU")
    if Feature.SLEEP not in ENGINES[engine].supports:
        raise ValueError(f"`sleep_group` does not go with `engine: {engine}`, which has no sleep")
