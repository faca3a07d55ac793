"""What clients of httpx need to know of TLS."""

from __future__ import annotations

import ssl


def verification(*urls: str) -> ssl.SSLContext | bool:
    """`verify` of a client whose requests go to these URLs. By default it reads all certificates,
    for tens of milliseconds; it trusts nobody if no URL needs them.
    """
    return True if needs_trust(*urls) else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def needs_trust(*urls: str) -> bool:
    """Whether requests to one of these URLs need certificates."""
    return not all(url.lower().startswith("http://") for url in urls)
