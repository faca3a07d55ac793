"""The tinker SDK, without what it waits for as it is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.forking import SdkCommand

_RUN_WITHOUT_TEARDOWN = (
    "import os, runpy, sys; sys.argv.pop(0); sys.path[0] = os.path.dirname(sys.argv[0]); "
    "import tinker; tinker.ServiceClient.__exit__ = lambda *_: None; "
    "runpy.run_path(sys.argv[0], run_name='__main__'); sys.stdout.flush(); os._exit(0)"
)
"""The SDK's daemon thread outlives its clients. Before Python 3.14, a daemon thread that is in
pydantic's native code at interpreter shutdown can abort the process (CPython issue 87135). Its own
`with` waits without an end for the session to close.
"""


def run_script(
    script: str, *arguments: str, cwd: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> str:
    """What a script printed that uses the SDK. It must succeed."""
    with SdkCommand(
        [sys.executable, "-c", _RUN_WITHOUT_TEARDOWN, script, *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, errors[-4000:]
    return out


@contextmanager
def service_client(**options: Any) -> Iterator[Any]:
    """The SDK's own `with` waits without an end for the session to close."""
    import tinker

    client = tinker.ServiceClient(**options)
    try:
        yield client
    finally:
        with suppress(TimeoutError):
            client.close("success").result(timeout=20)
