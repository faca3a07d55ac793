"""The API's side of a training worker on another machine: its messages go over the connection that
starts it there, as ssh starts an agent (`remote_worker.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from skyctl import __version__
from skyctl.children import started
from skyctl.launch.base import Node
from skyctl.launch.remote.session import command_on, connection_environment
from skyctl.store.owned import own_stdin
from skyctl.tinker import worker_messages

RELAY = "skyctl.tinker.remote_worker"
GREETING = "skyctl-trainer"
GREET_S = 180.0
"""A login shell and an interpreter on a network disk may take long."""
BEAT_S = 2.0
CHUNK = 1 << 20


async def connect(node: Node, settings: Mapping[str, Any], seen: str) -> asyncio.subprocess.Process:
    """The connection to a worker that starts on a node; its pipes carry messages. `seen` is a file
    that is to be seen there, if it is not "".

    Raises:
        OSError, EOFError, TimeoutError: it cannot be started there; the text says why.
    """
    client = await started(
        asyncio.create_subprocess_exec(
            *command_on(node, [node.python, "-P", "-m", RELAY]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=connection_environment(),
            limit=CHUNK,
        )
    )
    own_stdin(client)
    assert client.stdin is not None and client.stdout is not None
    try:
        async with asyncio.timeout(GREET_S):
            words: list[str] = []
            while words[:1] != [GREETING]:  # what a login shell prints comes first
                if not (line := await client.stdout.readline()):
                    raise EOFError(f"{node.target} starts no trainer with {node.python}")
                words = line.decode(errors="replace").split()
        if words[1:] != [__version__]:
            raise EOFError(f"{node.target} has skyctl {words[-1]}, this machine {__version__}")
    except BaseException:
        client.kill()
        raise
    start = {"settings": dict(settings), "grace_s": node.grace_s, "seen": seen}
    client.stdin.write(worker_messages.pack(start))
    return client


async def beat(client: asyncio.subprocess.Process, grace_s: float) -> None:
    """Tell the other side, which waits for `grace_s`, for as long as the connection lives that this
    one does.
    """
    assert client.stdin is not None
    while client.returncode is None and not client.stdin.is_closing():
        client.stdin.write(worker_messages.pack({"do": "beat"}))
        await asyncio.sleep(min(BEAT_S, grace_s / 4))
