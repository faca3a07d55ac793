"""A small router: list, add and remove workers; requests to them in turn; a page of metrics.

Started with pairs it takes no more workers, as vllm-router 0.1.17 does not.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--prometheus-port", type=int, default=0)
parser.add_argument("--worker-urls", nargs="*", default=[])
parser.add_argument("--prefill", action="append", default=[])
parser.add_argument("--decode", action="append", default=[])
parser.add_argument("--policy")
options, _ignored = parser.parse_known_args()
if options.policy == "power_of_two" and len(options.worker_urls) == 1:
    parser.error("Power-of-two policy requires at least 2 workers")
workers = list(dict.fromkeys([*options.worker_urls, *options.prefill, *options.decode]))
turns = itertools.count()
answers = {"requests": 0, "request_errors": 0}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if urlsplit(self.path).path.startswith("/v1/"):
            self._forward()
        else:
            self._answer({"urls": workers})

    def do_POST(self) -> None:
        split = urlsplit(self.path)
        if split.path.startswith("/v1/"):
            self._forward()
            return
        [url] = parse_qs(split.query)["url"]
        if split.path == "/add_worker" and options.prefill:
            self.send_error(400, "PD router requires specific methods")
            return
        if split.path == "/add_worker" and url not in workers:
            workers.append(url)
        if split.path == "/remove_worker" and url in workers:
            workers.remove(url)
        self._answer("ok")

    def _forward(self) -> None:
        """Piece by piece, so that streams stay streams."""
        answers["requests"] += 1
        if not workers:
            answers["request_errors"] += 1
            self.send_error(503, "No available workers")
            return
        worker = urlsplit(workers[next(turns) % len(workers)])
        connection = http.client.HTTPConnection(worker.netloc)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {"Content-Type": "application/json"}
        if given := self.headers.get("Authorization"):
            headers["Authorization"] = given  # vllm-router 0.1.17 does so here, but not below /
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"])
        self.end_headers()
        while piece := answer.read1():
            self.wfile.write(piece)

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


class Metrics(Handler):
    def do_GET(self) -> None:
        lines = [f'vllm_router_{name}_total{{route="/v1"}} {n}\n' for name, n in answers.items()]
        lines += [f'vllm_router_worker_health{{worker="{url}"}} 1\n' for url in workers]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(lines).encode())


metrics = ThreadingHTTPServer(("127.0.0.1", options.prometheus_port), Metrics)
threading.Thread(target=metrics.serve_forever, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
