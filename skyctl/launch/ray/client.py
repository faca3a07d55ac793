"""What ssh is to a machine, for Ray: a process whose pipes are those of another on a node.

    python -m skyctl.launch.ray.client DRIVER PARENT CLUSTER ADDRESS COMMAND

It hands its pipes to the driver of that name (`driver.py`), which it starts if there is none, and
ends as the driver says. The driver stays as long as PARENT, or the parent of another client, lives.
It imports little: it starts in a tenth of the time that Ray takes to import.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from skyctl.store.identity import create_time, peer

TAKEN = b"+"
DRIVERS_NAME = "skyctl-ray"
"""By which the kernel lists drivers, even those that have ended and that were not reaped."""
_DRIVER = "skyctl.launch.ray.driver"
_TRIES = 5
_CODE_BYTES = 16
_TAKEN_S = 40.0
"""Less than a session waits for its agent (`remote/session.py`)."""
_CONNECTED_S = 120.0
"""By this age a driver has connected, or has failed to."""


def main() -> None:
    """Be the local end of one connection."""
    name, parent, cluster, address, command = sys.argv[1:]
    request: dict[str, Any]
    request = {"cluster": json.loads(cluster), "address": address, "command": command}
    pipes = [0, 1, 2]
    with contextlib.suppress(OSError):  # it has ended
        alive = os.pidfd_open(int(parent))
        if os.getppid() == int(parent):
            request["parent"] = int(parent)
            pipes.append(alive)
    for _ in range(_TRIES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as driver:
            try:
                driver.connect(f"\0{name}")
            except ConnectionRefusedError:
                _start(name, cluster)
                continue
            if peer(driver)[1] != os.getuid():
                sys.exit(f"another user has taken the name {name}")
            driver.settimeout(_TAKEN_S)
            with contextlib.suppress(ConnectionError):  # it was just ending
                socket.send_fds(driver, [json.dumps(request).encode()], pipes)
                try:
                    taken = driver.recv(1) == TAKEN
                except TimeoutError:
                    _end_hung(peer(driver)[0])
                    continue
                if taken:
                    driver.settimeout(None)
                    _end_as_told(driver)
    sys.exit("the connection to Ray ends as soon as it was made")


def _end_hung(pid: int) -> None:
    """End a driver that takes no client, unless it may still be connecting: all connections to the
    cluster would wait for it, and servers end when no client is heard.
    """
    with contextlib.suppress(OSError):  # it has ended
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - (create_time(pid) or math.inf)
        if name == DRIVERS_NAME and age_s > _CONNECTED_S:
            os.kill(pid, signal.SIGKILL)
            return
    sys.exit("the driver that connects to Ray does not answer")


def _start(name: str, cluster: str) -> None:
    """Returns when there is a driver, ours or another's."""
    start = [sys.executable, "-P", "-m", _DRIVER, name, cluster]
    if code := subprocess.run(
        start, stdin=subprocess.DEVNULL, stdout=sys.stderr, cwd="/"
    ).returncode:
        sys.exit(code)


def _end_as_told(driver: socket.socket) -> None:
    code = b""
    with contextlib.suppress(ConnectionError):
        code = driver.recv(_CODE_BYTES)
    sys.exit(int(code) if code else "the connection to Ray has ended")


if __name__ == "__main__":
    main()
