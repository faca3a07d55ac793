"""`skyctl_versions.Versioned`: answers with versions, for an interpreter without skyctl."""

from __future__ import annotations

from skyctl_guard import load  # type: ignore[import-not-found]

Versioned = load("versions").Versioned
