"""What ssh is to a machine, for Ray: a process whose pipes are those of another on a node.

    python -m skyctl.launch.ray.client DRIVER PARENT CLUSTER ADDRESS COMMAND

It hands its pipes to the driver of that name (`driver.py`), which it starts if there is none, and
ends as the driver says. The driver stays as long as PARENT, or anyone else who had it asked, lives.
It imports little: it starts in a tenth of the time that Ray takes to import.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

from skyctl.store.identity import peer

TAKEN = b"+"
DRIVERS_NAME = "skyctl-ray"
"""By which the kernel lists drivers, even those that have ended and that nobody has waited for."""
_DRIVER = "skyctl.launch.ray.driver"
_TRIES = 5
_CODE_BYTES = 16


def main() -> None:
    """Be the local end of one connection."""
    name, parent, cluster, address, command = sys.argv[1:]
    wanted: dict[str, Any]
    wanted = {"cluster": json.loads(cluster), "address": address, "command": command}
    pipes = [0, 1, 2]
    with contextlib.suppress(OSError):  # it has ended
        alive = os.pidfd_open(int(parent))
        if os.getppid() == int(parent):
            wanted["parent"] = int(parent)
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
            with contextlib.suppress(ConnectionError):  # it was just ending
                socket.send_fds(driver, [json.dumps(wanted).encode()], pipes)
                if driver.recv(1) == TAKEN:
                    _end_as_told(driver)
    sys.exit("the connection to Ray ends as soon as it was made")


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
