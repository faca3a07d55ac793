"""OpenTelemetry spans of pushes: one per push, with one child per stage.

They are made when OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) is set and the `otel` extra is
installed; otherwise nothing of OpenTelemetry is imported. A tracer provider that the program has
already set up (a trainer's) is used as it is. `TRACEPARENT`, or the current span where a push is
requested, becomes the parent, also when the supervisor carries it out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from skyctl.push.request import PushFleet, PushObserver, PushRequest, PushResult

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_RESULT_KEYS = (
    "version",
    "transport",
    "total_bytes",
    "chunks",
    "gb_per_s",
    "freeze_window_s",
    "content_digest",
)


class TracedPush(PushObserver):
    """An observer that records spans."""

    def __init__(self, request: PushRequest, fleet: PushFleet, tracer: Tracer) -> None:
        self._tracer = tracer
        self._stage: Span | None = None
        self._push = tracer.start_span(
            "skyctl.push",
            context=_context(request.traceparent),
            attributes={
                "skyctl.fleet": fleet.name,
                "skyctl.servers": [server.name for server in fleet.servers],
                "skyctl.checkpoint": request.checkpoint,
            },
        )

    def stage(self, name: str) -> None:
        from opentelemetry.trace import set_span_in_context

        self._end_stage()
        self._stage = self._tracer.start_span(
            f"skyctl.push.{name}", context=set_span_in_context(self._push)
        )

    def server(self, name: str, state: str, detail: str = "", requests: int = 0) -> None:
        if self._stage is not None:
            attributes = {"skyctl.server": name, "skyctl.state": state, "skyctl.detail": detail}
            self._stage.add_event("server", attributes)

    def intend(self, states: Mapping[str, str]) -> None:
        for name, state in states.items():
            self.server(name, state)

    def note(self, message: str) -> None:
        self._push.add_event("note", {"skyctl.message": message})

    def finish(self, result: PushResult) -> None:
        """The push succeeded."""
        data = result.to_json()
        self._push.set_attributes({f"skyctl.{key}": data[key] for key in _RESULT_KEYS})

    def end(self, error: BaseException | None) -> None:
        """End every span, recording the error if there is one."""
        for span in (self._stage, self._push):
            if span is not None and error is not None:
                from opentelemetry.trace import StatusCode

                span.set_status(StatusCode.ERROR, str(error) or type(error).__name__)
        if error is not None:
            self._push.record_exception(error)
        self._end_stage()
        self._push.end()

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage.end()
            self._stage = None


@contextmanager
def traced(request: PushRequest, fleet: PushFleet) -> Iterator[TracedPush | None]:
    """The spans of a push, which end with the block; None if there are to be none."""
    recorder = tracer() if configured() else None
    if recorder is None:
        yield None
        return
    push = TracedPush(request, fleet, recorder)
    try:
        yield push
    except BaseException as error:
        push.end(error)
        raise
    push.end(None)


def configured(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for traces."""
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not disabled and any(environ.get(name) for name in _ENDPOINTS)


def current_traceparent(environ: Mapping[str, str] = os.environ) -> str | None:
    """W3C trace context of the program's current span, else $TRACEPARENT."""
    if "opentelemetry.trace" in sys.modules:  # otherwise no span can be current
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        if "traceparent" in carrier:
            return carrier["traceparent"]
    return environ.get("TRACEPARENT")


def _context(traceparent: str | None) -> Any:
    """The context of a parent in another process; None is the current one."""
    if traceparent is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


@cache
def tracer() -> Tracer | None:
    """The program's tracer, else one of our own that exports; None without OpenTelemetry."""
    try:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):  # nobody has set one up
            provider = _provider()
    except ImportError:
        return None
    return provider.get_tracer("skyctl")


def _provider() -> Any:
    """A provider that sends spans to the endpoint in the background and at process exit."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if any(os.environ.get(name) == "grpc" for name in _PROTOCOLS):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "skyctl"}
    provider = TracerProvider(resource=Resource.create(name))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
