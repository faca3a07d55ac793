"""What clients of httpx need to know of TLS."""

from __future__ import annotations

import ssl


def verification(*urls: str) -> ssl.SSLContext | bool:
    """`verify` of a client whose requests go to these URLs. By default it reads all certificates,
    for tens of milliseconds; it trusts nobody if no URL needs them.
    """
    plain = all(url.lower().startswith("http://") for url in urls)
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True
