"""`skyctl_gate.Gate`: skyctl's gate for an interpreter that does not have skyctl."""

from __future__ import annotations

from skyctl_guard import load  # type: ignore[import-not-found]

_module = load("gate")
GENERATES, Gate, Message = _module.GENERATES, _module.Gate, _module.Message
Upload, Watched, error = _module.Upload, _module.Watched, _module.error
json_object, posted = _module.json_object, _module.posted
