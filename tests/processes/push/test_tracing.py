"""Tracing in interpreters that have it not, or are not told of it."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_of_it_is_imported_when_it_is_not_configured() -> None:
    code = """
import os, sys
os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
import skyctl.push.transaction
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.tracing import current_traceparent, traced
with traced(PushRequest("/ckpt"), PushFleet("f", ())) as spans:
    assert spans is None
current_traceparent()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_it_is_off_where_the_extra_is_not_installed() -> None:
    code = """
import os, sys
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
sys.modules["opentelemetry"] = None
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.tracing import traced
with traced(PushRequest("/ckpt"), PushFleet("f", ())) as spans:
    assert spans is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
