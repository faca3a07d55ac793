"""Launchers: `base` defines what one is; each launcher has a package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.plugins import Plugins

if TYPE_CHECKING:
    from skyctl.launch.base import Host

__all__ = ["DEFAULT", "HOSTS"]

DEFAULT = "local"
HOSTS: Plugins[Host] = Plugins(
    "launcher",
    "skyctl.launchers",
    {
        DEFAULT: "skyctl.launch.local.host:LOCAL",
        "ssh": "skyctl.launch.remote.host:SSH",
        "ray": "skyctl.launch.ray.host:RAY",
    },
)
"""By the fleet file's `launcher:`. Other packages add theirs as `skyctl.launchers` entry points."""
