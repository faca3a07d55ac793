"""Certificates are read for TLS only, and without them no server is trusted."""

from __future__ import annotations

import ssl

import pytest

from skyctl.http.trust import verification


def test_no_certificates_are_read_for_plain_http() -> None:
    verify = verification("http://a:8000", "HTTP://b")
    assert isinstance(verify, ssl.SSLContext)
    assert verify.cert_store_stats()["x509"] == 0
    assert verify.verify_mode is ssl.CERT_REQUIRED
    assert verify.check_hostname


@pytest.mark.parametrize(
    "urls", [("https://a",), ("HTTPS://a",), ("http://a", "https://b"), ("a",)]
)
def test_any_other_url_has_the_default_trust(urls: tuple[str, ...]) -> None:
    assert verification(*urls) is True
