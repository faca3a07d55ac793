"""A router that only keeps its list of workers: list, add, remove."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--worker-urls", nargs="*", default=[])
options, _ignored = parser.parse_known_args()
workers: list[str] = list(options.worker_urls)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"urls": workers})

    def do_POST(self) -> None:
        split = urlsplit(self.path)
        [url] = parse_qs(split.query)["url"]
        if split.path == "/add_worker" and url not in workers:
            workers.append(url)
        if split.path == "/remove_worker" and url in workers:
            workers.remove(url)
        self._answer("ok")

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
