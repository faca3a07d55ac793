"""Where clients find the Tinker API of a fleet."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.core.plan import local_url
from skyctl.errors import UsageError

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef


@dataclass(frozen=True)
class Place:
    """Where clients find the API: its URL, and the file of mode 0600 with their key."""

    url: str
    key_file: Path

    def as_env(self) -> str:
        """Lines for a POSIX shell; the key itself is not printed."""
        return "\n".join(
            (
                f"export TINKER_BASE_URL={shlex.quote(self.url)}",
                f'export TINKER_API_KEY="$(cat {shlex.quote(str(self.key_file))})"',
            )
        )


def place_of(ref: FleetRef) -> Place:
    """Where the API of this fleet is, or will be.

    Raises:
        UsageError: its fleet file has no section `tinker:`.
    """
    section = ref.config.tinker
    if section is None:
        raise UsageError(
            f"fleet {ref.name} has no Tinker API",
            hint="write `tinker: {base_model: ORG/NAME}` and `lora: {max_rank: 32}` into its "
            "fleet file; then: skyctl up",
        )
    return Place(local_url(section.host, section.port), ref.paths.tinker_key)
