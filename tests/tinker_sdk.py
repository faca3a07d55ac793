"""The tinker SDK's client, left within 20 s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def service_client(**options: Any) -> Iterator[Any]:
    """The SDK's own `with` waits without an end for the session to close."""
    import tinker

    client = tinker.ServiceClient(**options)
    try:
        yield client
    finally:
        with suppress(TimeoutError):
            client.close("success").result(timeout=20)
