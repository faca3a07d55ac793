"""A fleet's secrets: made once, kept in files of mode 0600, given to servers at their spawn.

Plans hold `AT_SPAWN` in their place, so no plan, hash, socket message or file contains them.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.store.paths import FleetPaths, place_private_file

CONTROL_TOKEN = "SKYCTL_CONTROL_TOKEN"
AT_SPAWN = "(set at its start)"
_BYTES = 32
_LONGEST = 4096


@dataclass(frozen=True)
class Credentials:
    """`control` opens every route, `inference` those of the data plane."""

    control: str = field(repr=False)
    inference: str = field(repr=False)

    def fill(self, env: Mapping[str, str], key_variable: str) -> dict[str, str]:
        """`env` with the secrets in place of `AT_SPAWN`; `key_variable` holds the API key."""
        own = {CONTROL_TOKEN: self.control, key_variable: self.inference}
        return {
            name: own[name] if value == AT_SPAWN and name in own else value
            for name, value in env.items()
        }


def ensure_credentials(paths: FleetPaths) -> Credentials:
    """The fleet's secrets; made if missing. Its directory must exist.

    Raises:
        SkyctlError: a file is not a plain file of ours, or holds no secret.
    """
    return Credentials(ensure_secret(paths.control_token), ensure_secret(paths.api_key))


def ensure_tinker_key(paths: FleetPaths) -> str:
    """The key of the Tinker API; made if missing. Raises as `ensure_credentials`."""
    return ensure_secret(paths.tinker_key, prefix="tml-")  # the SDK accepts no other prefix


def read_secret(path: Path) -> str | None:
    """The secret in the file; None if there is no file.

    Raises:
        SkyctlError: it is a symlink, another user's, readable by others, or holds no secret.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(path, f"cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):  # a directory cannot even be opened below
        os.close(descriptor)
        raise _refused(path, "is not a plain file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_uid != os.getuid():
            raise _refused(path, f"belongs to uid {status.st_uid}, not to you")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise _refused(path, "can be read by others")
        text = file.read(_LONGEST).decode(errors="replace").strip()
    if len(text) < _BYTES or not text.isascii() or not text.isprintable() or " " in text:
        raise _refused(path, "does not hold a secret")
    return text


def ensure_secret(path: Path, *, prefix: str = "") -> str:
    """The secret in the file; made if missing. Raises as `read_secret`."""
    secret = read_secret(path)
    if secret is not None:
        return secret
    place_private_file(path, f"{prefix}{secrets.token_hex(_BYTES)}\n".encode())
    made = read_secret(path)
    assert made is not None  # linked just now, by us or by another process
    return made


def _refused(path: Path, problem: str) -> SkyctlError:
    return SkyctlError(f"{path} {problem}", hint="remove it; then: skyctl down && skyctl up")
