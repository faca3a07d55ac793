"""Senders for tests."""

from __future__ import annotations

from typing import Any

from skyctl.transfer.sender_client import SenderProcess


async def start_sender(*, options: dict[str, Any] | None = None, **opening: Any) -> SenderProcess:
    """A new sender process with its first push opened."""
    sender = await SenderProcess.spawn("")
    await sender.open(carrier=options or {}, **opening)
    return sender
