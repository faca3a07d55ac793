"""Prometheus file service discovery for a fleet: what to scrape, and with which labels.

Format: https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyctl.core.urls import FleetUrls
from skyctl.errors import UsageError

_MODE = 0o644  # Prometheus runs as another user, and there is no secret in it


def target_groups(urls: FleetUrls) -> list[dict[str, Any]]:
    """One group per server and one for the router, with labels fleet, server, role and model."""
    groups = [_group(urls, name, "server", url) for name, url in urls.servers.items()]
    if urls.router_metrics:
        groups.append(_group(urls, "router", "router", urls.router_metrics))
    return groups


def write_targets(urls: FleetUrls, path: Path) -> int:
    """Write the groups to a .json file, whole or not at all; how many there are.

    Raises:
        UsageError: it cannot be written, or Prometheus would not read it.
    """
    if path.suffix != ".json":
        raise UsageError(
            f"{path}: Prometheus reads file_sd files only when they end in .json, .yml or .yaml",
            hint=f"name it {path.with_suffix('.json')}",
        )
    groups = target_groups(urls)
    # same directory: a rename is atomic within a file system; no watched suffix
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, _MODE)  # whatever the umask is
            file.write(json.dumps(groups, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return len(groups)


def _group(urls: FleetUrls, name: str, role: str, url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    labels = {"fleet": urls.name, "server": name, "role": role}
    if urls.model:
        labels["model"] = urls.model
    if parts.scheme != "http":
        labels["__scheme__"] = parts.scheme
    return {"targets": [parts.netloc], "labels": labels}
