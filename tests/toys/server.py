"""A toy of an inference server, with routes of its own: `python -m tests.toys.server PORT MODEL`.

GET /toy tells what it does, POST /toy/hold and /toy/go stop it and let it go on. Completions are
OpenAI's, streamed: numbers, each a token.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, MODEL = int(sys.argv[1]), sys.argv[2]
going = threading.Event()
going.set()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/toy":
            self._answer(json.dumps({"model": MODEL, "held": not going.is_set()}))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path == "/toy/hold":
            going.clear()
        elif self.path == "/toy/go":
            going.set()
        elif self.path == "/v1/completions":
            going.wait()
            self._answer(self._events(body["max_tokens"]), "text/event-stream")
            return
        self._answer("{}")

    def _events(self, tokens: int) -> str:
        choices = [
            {"text": f"{n} ", "token_ids": [n], "finish_reason": "length" if n == tokens else None}
            for n in range(1, tokens + 1)
        ]
        choices[0]["prompt_token_ids"] = [0]
        return "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in choices)

    def _answer(self, text: str, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
