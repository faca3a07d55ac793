"""The stub's weights from worker to worker: what `engines/vllm/inside/worker_copies.py` does,
through a file with the digest and the contents.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from tests.stub.state import EngineRefused, StubEngine


class StubCopies:
    """`fault` is where a copy out of it goes wrong: "share", "fill" (after a first chunk), or
    "digest": other weights arrive.
    """

    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine
        self._source = self._key = ""
        self.fault = ""

    def rpc(self, method: str, kwargs: dict[str, Any]) -> Any:
        match method.removeprefix("skyctl_weights_"):
            case "fill" | "copy" if kwargs["key"] != self._key:
                raise EngineRefused("Worker failed with error 'this copy was given up'")
            case "share":
                self._key = kwargs["key"]
                reason = "it is quantized" if self.fault == "share" else ""
                self._source = f"{kwargs['directory']}/rank-0"
                rows = {"sources": [[self._source, 0]], "total_bytes": 2, "buffer_bytes": 1}
                return {"form": "stub", "reason": reason, **rows}
            case "fill" if self.fault == "fill" and kwargs["chunk"]:
                raise EngineRefused("Worker failed with error 'this copy was given up'")
            case "fill":
                digest = "another" if self.fault == "digest" else self._engine.digest
                Path(self._source).write_text(repr((digest, self._engine.contents)))
            case "open":
                self._key = kwargs["key"]
                self._source = kwargs["offers"][0]["sources"][0][0]
            case "copy" if kwargs["last"]:
                self._take(*ast.literal_eval(Path(self._source).read_text()))
            case "copy":
                self._take("half copied", {})
        return None

    def _take(self, digest: str, contents: dict[str, tuple[str, bytes]]) -> None:
        self._engine.digest, self._engine.contents = digest, contents
        if not self._engine.paused:
            self._engine.served.append(f"{digest}, unpaused")
