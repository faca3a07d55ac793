"""Shell completion of values: fleet, replica and job names of this machine's fleets.

Completers must be fast and silent: they read the state directory and never raise.
"""

from __future__ import annotations


def fleets(incomplete: str) -> list[str]:
    """Names of the fleets this user has."""
    from skyctl.fleet import registry

    try:
        names = registry.known_fleets()
    except OSError:
        return []
    return [name for name in names if name.startswith(incomplete)]
