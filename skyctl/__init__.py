"""skyctl: launch, freeze, thaw and re-weight fleets of vLLM servers.

from skyctl import Fleet

async with Fleet.load("fleet.yaml") as fleet:
    result = await fleet.sync_weights("runs/step-200")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyctl.api.fleet import Fleet

__version__ = "0.1.0"
__all__ = ["Fleet", "__version__"]


def __getattr__(name: str) -> Any:
    # on first use: every command imports this package, and most of them need none of the API
    if name == "Fleet":
        from skyctl.api.fleet import Fleet

        return Fleet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
