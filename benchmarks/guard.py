"""What the guard costs: one route of a trivial ASGI app under uvicorn, with and without it.

    python -m benchmarks.guard [--requests 300] [--rounds 41] [--result FILE]

Two servers in processes of their own take turns; one client sends one request after the other on a
connection that is kept. `wall_us` is a request as the client sees it, `cpu_us` the time its server
spent on a processor (other load disturbs that less), `ratio` guarded over bare. `call_us` is the
guard alone: one ASGI call of an app that does nothing. Medians of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from skyctl.engines.inside.guard import HELD_VARIABLE, TOKEN_VARIABLE, VLLM, Guard

ROOT = Path(__file__).parents[1]
KEY = "k" * 64
ENVIRON = {
    TOKEN_VARIABLE: "t" * 64,
    VLLM.key_variable: KEY,
    HELD_VARIABLE: "/nowhere/s-0.held",
}
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
PATH = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": "x" * 1000})


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads a body and answers with a few bytes."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
    await send({"type": "http.response.body", "body": b"{}"})


def serve(guarded: bool) -> None:
    """Print the port, then answer until stdin ends."""
    import socket
    import threading

    import uvicorn

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    application: Any = Guard(app, environ=ENVIRON) if guarded else app
    server = uvicorn.Server(uvicorn.Config(application, log_level="critical", lifespan="off"))
    print(listener.getsockname()[1], flush=True)

    def stop_with_parent() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop_with_parent, daemon=True).start()
    server.run(sockets=[listener])


class Server:
    """One of the two, and a connection to it that is kept. Use as a context manager."""

    def __init__(self, *, guarded: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.guard", "--serve", "yes" if guarded else "no"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout
        port = int(self._process.stdout.readline())
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _cpu_ns(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0])

    def round_us(self, requests: int) -> tuple[float, float]:
        """Mean microseconds of one request: wall time, and the server's processor time."""
        began, began_ns = time.perf_counter(), self._cpu_ns()
        for _ in range(requests):
            self._connection.request("POST", PATH, BODY, HEADERS)
            answer = self._connection.getresponse()
            answer.read()
            assert answer.status == 200
        wall_s, cpu_ns = time.perf_counter() - began, self._cpu_ns() - began_ns
        return wall_s / requests * 1e6, cpu_ns / requests / 1e3


def call_us(calls: int = 50_000) -> float:
    """Microseconds that the guard adds to one ASGI call."""

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        pass

    async def mean(application: Any) -> float:
        given = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        others = [(b"host", b"h"), (b"accept", b"*/*"), (b"user-agent", b"x"), *given]
        began = time.perf_counter()
        for _ in range(calls):
            scope = {"type": "http", "path": PATH, "headers": others}
            await application(scope, None, None)
        return (time.perf_counter() - began) / calls * 1e6

    async def both() -> float:
        guard = Guard(nothing, environ=ENVIRON)
        return statistics.median([await mean(guard) - await mean(nothing) for _ in range(5)])

    return asyncio.run(both())


def measure(requests: int, rounds: int) -> dict[str, Any]:
    with Server(guarded=False) as bare, Server(guarded=True) as guarded:
        pairs = []
        for number in range(rounds + 1):
            first, second = (bare, guarded) if number % 2 else (guarded, bare)
            taken = {first: first.round_us(requests), second: second.round_us(requests)}
            pairs.append((taken[bare], taken[guarded]))
    counted = pairs[1:]
    found: dict[str, Any] = {}
    for index, name in enumerate(("wall_us", "cpu_us")):
        bare_us = statistics.median(b[index] for b, _ in counted)
        guarded_us = statistics.median(g[index] for _, g in counted)
        ratio = statistics.median(g[index] / b[index] for b, g in counted)
        found[name] = {
            "bare": round(bare_us, 1),
            "guarded": round(guarded_us, 1),
            "ratio": round(ratio, 3),
        }
    return {
        "requests": requests,
        "rounds": rounds,
        **found,
        "call_us": round(call_us(), 2),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--serve", choices=["yes", "no"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve == "yes")
        return
    result = measure(options.requests, options.rounds)
    print(json.dumps(result, indent=2))
    if options.result:
        options.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
