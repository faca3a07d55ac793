"""A server that is up in a tenth of a second: health, models, pause and resume, and nothing else.

Run as a file, without site packages, where a test starts and ends hundreds of servers.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--port", type=int, required=True)
options, _ignored = parser.parse_known_args()
state = {"paused": False}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        answers: dict[str, object] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "light"}]},
            "/is_paused": {"is_paused": state["paused"]},
            "/is_sleeping": {"is_sleeping": state["paused"]},
            "/version": {"version": "0.32.0"},
            "/weight_info": {"weight_version": "default"},
        }
        if path in answers:
            self._answer(200, json.dumps(answers[path]))
        elif path.startswith("/metrics"):
            self._answer(200, "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n")
        else:
            self._answer(404, "{}")

    def do_POST(self) -> None:
        state["paused"] = urlsplit(self.path).path == "/pause"
        self._answer(200, "{}")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
