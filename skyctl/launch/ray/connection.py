"""From a fleet file's `ray:` to a connected process, or to one sentence that says why not."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skyctl.errors import HostUnreachable
from skyctl.launch.base import RayCluster

LOOK = "look at the cluster: ray status"
NAMESPACE = "skyctl"
_DIAL_S = 5.0
_OPEN_S = 30.0
_WIDEST = 300
_TOKEN_HINT = (
    "start the cluster with a token (ray get-auth-token --generate, the same on every node), or "
    "write `ray: {allow_unauthenticated: true}` where no other user reaches it"
)
_REFUSED = 3
# Whether the cluster admits clients without a token. In a process of its own: Ray reads the mode
# once.
_KNOCK = f"""
import sys
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
try:
    address = canonicalize_bootstrap_address_or_die(sys.argv[1])
    GcsClient(address=address).get_all_node_info(timeout={_DIAL_S})
except Exception as error:
    sys.exit({_REFUSED} if "Authentication" in repr(error) else 1)
"""


def connect(cluster: RayCluster) -> None:
    """Be a driver of the cluster from now on.

    Raises:
        SkyctlError: Ray is missing here, or too old; there is no token.
        HostUnreachable: the cluster cannot be reached, or does not let us in.
    """
    _installed()
    has_token = _token(os.environ, Path.home()) is not None
    if not has_token and not cluster.allow_unauthenticated:
        raise HostUnreachable(
            "there is no token for the Ray cluster: without one, every process that reaches the "
            "cluster runs code there",
            hint=_TOKEN_HINT,
        )
    if cluster.address != "auto":
        _dial(cluster.address)
    # match the cluster: if only one side shows a token, the other ends its actors; and in token
    # mode without a token Ray does not raise, it aborts the process
    shown = has_token and not (cluster.allow_unauthenticated and _is_open(cluster.address))
    os.environ["RAY_AUTH_MODE"] = "token" if shown else "disabled"
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    import ray
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray._raylet import GcsClient

    try:
        address = canonicalize_bootstrap_address_or_die(cluster.address)
        # first: `init` takes half a minute to fail for a missing head or a wrong token
        _dial(address)
        GcsClient(address=address).get_all_node_info(timeout=_DIAL_S)
        where = {"address": address, "namespace": NAMESPACE, **_own_address(address)}
        ray.init(**where, log_to_driver=False, logging_level="CRITICAL")
    except HostUnreachable:
        raise
    except Exception as error:
        raise _refusal(cluster, error) from error


def connected() -> bool:
    """Whether the cluster still is the one that this process has connected to, and answers."""
    import ray
    from ray._raylet import GcsClient

    try:
        context = ray.get_runtime_context()
        _dial(context.gcs_address)
        nodes = GcsClient(address=context.gcs_address).get_all_node_info(timeout=_DIAL_S)
        return context.get_node_id() in {node.hex() for node in nodes}
    except Exception:  # Ray's errors have many types
        return False


def refuse_open(cluster: RayCluster) -> None:
    """Refuse a cluster that admits clients without a token, unless the fleet file allows that.
    Raises HostUnreachable: it does, or it is unknown.
    """
    if not cluster.allow_unauthenticated and _is_open(cluster.address):
        raise HostUnreachable(
            "the Ray cluster requires no token: every process that reaches it runs code there",
            hint=_TOKEN_HINT,
        )


@cache  # of this process's cluster: another one that takes its place is another connection's
def _is_open(address: str) -> bool:
    knock = [sys.executable, "-P", "-c", _KNOCK, address]
    environ = {name: value for name, value in os.environ.items() if "RAY_AUTH" not in name}
    environ |= {"RAY_AUTH_MODE": "disabled"}
    try:
        code = subprocess.run(
            knock, env=environ, capture_output=True, timeout=_OPEN_S, stdin=subprocess.DEVNULL
        ).returncode
    except subprocess.TimeoutExpired:
        code = None
    if code not in (0, _REFUSED):
        raise HostUnreachable("it is unknown whether the Ray cluster requires a token", hint=LOOK)
    return code == 0


def _refusal(cluster: RayCluster, error: Exception) -> HostUnreachable:
    """Why Ray does not connect."""
    text = in_one_line(error)
    where = "" if cluster.address == "auto" else f" at {cluster.address}"
    if "Authentication" in repr(error):
        return HostUnreachable(
            f"the Ray cluster{where} does not take our token",
            hint="it must be the same on every node: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or "
            "~/.ray/auth_token",
        )
    if "ersion mismatch" in text:
        return HostUnreachable(
            f"the Ray cluster{where} has another Ray or Python than this machine: {text}",
            hint="install the cluster's versions here",
        )
    if isinstance(error, ConnectionError):
        return HostUnreachable(
            f"no Ray cluster answers{where}: {text}",
            hint="this machine must be one of its nodes: ray start --address=HEAD:6379",
        )
    return HostUnreachable(f"the Ray cluster{where} does not let us in: {text}", hint=LOOK)


def in_one_line(error: BaseException) -> str:
    """A Ray error in one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"


def _installed() -> None:
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise HostUnreachable(
            f"{sys.executable} has no ray, which `launcher: ray` needs",
            hint='the cluster\'s version: pip install "skyctl-fleet[ray]" "ray==VERSION"',
        ) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if not (2, 52) <= numbers < (3, 0):
        raise HostUnreachable(
            f"{sys.executable} has ray {installed}, and `launcher: ray` needs 2.52 to 2.x",
            hint="older ones require no token: every process that reaches them runs code",
        )


def _token(environ: Mapping[str, str], home: Path) -> str | None:
    """Where Ray finds a token; None if it would find none."""
    if environ.get("RAY_AUTH_TOKEN", "").strip():
        return "RAY_AUTH_TOKEN"
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else home / ".ray" / "auth_token"
    try:
        return str(path) if path.read_text().strip() else None
    except OSError:
        return None


def _dial(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _DIAL_S).close()
    except (OSError, ValueError) as error:
        raise HostUnreachable(
            f"no Ray cluster answers at {address}: {getattr(error, 'strerror', None) or error}",
            hint="correct `ray: {address: ...}`, or start the cluster's head",
        ) from error


def _own_address(address: str) -> dict[str, Any]:
    """The head's address, if this is its machine: else Ray takes the first interface's."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError:
        return {}
    return {"_node_ip_address": host}
