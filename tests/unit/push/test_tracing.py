"""Spans of pushes, as an OpenTelemetry collector receives them; and nothing without being asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skyctl.errors import PushError
from skyctl.push import tracing
from skyctl.push.request import PushRequest
from skyctl.push.tracing import configured, current_traceparent
from skyctl.push.transaction import push
from tests.unit.push.fleets import STAGES, Recorder, Stubs

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector:
    """An OTLP/HTTP collector on a loopback port; `spans()` flushes and returns what came."""

    url: str
    bodies: list[bytes] = field(default_factory=list)

    def spans(self) -> list[Any]:
        messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        flush = getattr(tracing.tracer().span_processor, "force_flush", None)  # type: ignore[union-attr]
        assert flush is not None and flush(10_000)
        found = []
        for body in self.bodies:
            request = messages.ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    found += scope.spans
        return sorted(found, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the otel extra")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    tracing.tracer.cache_clear()
    try:
        yield found
    finally:
        made = tracing.tracer()
        assert made is not None
        made.span_processor.shutdown()
        tracing.tracer.cache_clear()
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


async def test_a_push_is_one_span_with_a_child_per_stage(
    tmp_path: Path, collector: Collector
) -> None:
    stubs, recorder = Stubs(tmp_path), Recorder()
    request = PushRequest(
        str(stubs.new), weight_version="v1", traceparent=f"00-{TRACE}-{PARENT}-01"
    )
    async with stubs.client() as client:
        result = await push(request, stubs.fleet, client=client, observer=recorder)
    assert recorder.stages == STAGES, "the observer was told less"
    spans = {span.name: span for span in collector.spans()}
    whole = spans.pop("skyctl.push")
    assert list(spans) == [f"skyctl.push.{stage}" for stage in STAGES]
    assert all(span.parent_span_id == whole.span_id for span in spans.values())
    assert whole.trace_id.hex() == TRACE and whole.parent_span_id.hex() == PARENT
    for span in spans.values():
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano
    found = attributes(whole)
    assert found["skyctl.fleet"] == "demo" and found["skyctl.version"] == "v1"
    assert found["skyctl.freeze_window_s"] == pytest.approx(result.freeze_window_s)
    assert {event.name for event in spans["skyctl.push.resume"].events} == {"server"}


async def test_a_push_that_fails_says_so_in_its_span(tmp_path: Path, collector: Collector) -> None:
    stubs = Stubs(tmp_path)
    stubs.fail_update(1, calls=range(1, 99))
    with pytest.raises(PushError) as caught:
        async with stubs.client() as client:
            await push(PushRequest(str(stubs.new)), stubs.fleet, client=client, observer=Recorder())
    whole = next(span for span in collector.spans() if span.name == "skyctl.push")
    assert whole.status.code == 2 and whole.status.message == caught.value.message
    assert any(event.name == "exception" for event in whole.events)


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_environment_decides(environ: dict[str, str], on: bool) -> None:
    assert configured(environ) is on


def test_the_parent_is_the_current_span_or_comes_from_the_environment() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    environ = {"TRACEPARENT": f"00-{TRACE}-{PARENT}-01"}
    assert current_traceparent(environ) == environ["TRACEPARENT"]
    context = trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert current_traceparent(environ) == f"00-{1:032x}-{2:016x}-01"
    assert current_traceparent({}) is None


def test_a_request_with_a_parent_survives_its_json() -> None:
    request = replace(PushRequest("/ckpt"), traceparent="00-a-b-01")
    assert PushRequest.from_json(request.to_json()) == request
