"""For all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # a shell that puts us into the background has SIGINT ignored, and so would every command that
    # a test interrupts; a handler is not inherited, it becomes the default
    signal.signal(signal.SIGINT, signal.default_int_handler)
