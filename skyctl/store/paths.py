"""Where a fleet lives on disk, and the guarantee that no other user can read or redirect it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from skyctl.errors import SkyctlError, StateUnwritable, UsageError
from skyctl.store.owned import FileLock

# a disk that is full, read-only, failing or not ours; no disk at all
_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.ENOENT,
)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
# sun_path holds 108 bytes on Linux and 104 elsewhere, including the terminating zero
LONGEST_SOCKET_PATH_BYTES = 100
# a server names its sockets <directory>/<36 characters>
_EVERYBODYS = Path("/tmp")
_LONGEST_SCRATCH_PATH_BYTES = LONGEST_SOCKET_PATH_BYTES - 37


def expanded(path: str | Path) -> Path:
    """A path with its `~` expanded; that of a user who does not exist stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises


def state_root(environ: Mapping[str, str] | None = None) -> Path:
    """$SKYCTL_HOME, else $XDG_STATE_HOME/skyctl, else ~/.local/state/skyctl.

    Raises:
        UsageError: its path is not UTF-8, which JSON and the fleet's own copy of its file need.
    """
    environ = os.environ if environ is None else environ
    if environ.get("SKYCTL_HOME"):
        root = expanded(environ["SKYCTL_HOME"]).absolute()
    elif environ.get("XDG_STATE_HOME"):
        root = expanded(environ["XDG_STATE_HOME"]).absolute() / "skyctl"
    else:
        root = Path.home() / ".local" / "state" / "skyctl"
    try:
        str(root).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"skyctl cannot keep its state in {str(root)!a}: the path is not UTF-8",
            hint="point SKYCTL_HOME at another directory",
        ) from error
    return root


def private_directory(path: Path) -> Path:
    """Make `path` (mode 0700) unless it exists, and check that it is ours alone.

    Raises:
        SkyctlError: it is a symlink, not a directory, or belongs to another user.
        StateUnwritable: it cannot be made or read.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return owned_directory(path)
    except OSError as error:
        raise _failed("make", path, error) from error


def owned_directory(path: Path) -> Path:
    """Check that a directory is ours, and revoke all permissions of others.

    Raises:
        SkyctlError: it is a symlink, not a directory, or belongs to another user.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        raise SkyctlError(
            f"{path} is not a plain directory", hint="remove it, or point SKYCTL_HOME elsewhere"
        )
    if status.st_uid != os.getuid():
        raise SkyctlError(
            f"{path} belongs to uid {status.st_uid}, not to you", hint="point SKYCTL_HOME elsewhere"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def place_private_file(path: Path, content: bytes = b"", *, replace: bool = False) -> None:
    """Create a file of mode 0600, whole or not at all. Unless `replace`, never over one that
    another process has just made.

    Its descriptor is closed before the file has its name.

    Raises:
        SkyctlError: it cannot be written.
    """
    try:
        _place(path, content, replace)
    except OSError as error:
        raise _failed("write", path, error) from error


def _place(path: Path, content: bytes, replace: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    descriptor = create_private_file(temporary, os.O_EXCL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
            return
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def create_private_file(path: Path, flags: int = 0) -> int:
    """File descriptor of `path`, created with mode 0600; a symlink in its place is refused.

    Raises:
        SkyctlError: the path is a symlink or cannot be opened.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise _failed("open", path, error) from error


def sync_directory(directory: Path) -> None:
    """Flush a directory's names to disk: a file that was made or renamed exists after a crash.

    Raises:
        OSError: it cannot be opened, or the disk fails.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flocked(path: Path) -> bool:
    """Whether a live process holds the lock of this file.

    Raises:
        SkyctlError: it cannot be locked, or this process has too many open files to look.
    """
    try:
        file = FileLock(path, lambda: os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            raise _failed("open", path, error) from error
        return False
    with file:
        # shared: two processes that test at once must not take each other for the holder
        return not file.take(shared=True)


def _failed(verb: str, path: Path, error: OSError) -> SkyctlError:
    """The error of a file that cannot be created: StateUnwritable if the disk is at fault."""
    reason = error.strerror or str(error)
    message = f"cannot {verb} {path}: {reason}"
    if error.errno in _DISK:
        return StateUnwritable(message, hint=advice(path, reason))
    if error.errno in _TOO_MANY_FILES:
        return SkyctlError(message, hint="raise the limit in this shell: ulimit -n 65536")
    return SkyctlError(message, hint="remove it, or point SKYCTL_HOME elsewhere")


@dataclass(frozen=True)
class FleetPaths:
    """Every path of one fleet. Nothing is created until `prepare()`."""

    root: Path
    name: str

    @cached_property
    def directory(self) -> Path:
        return self.root / "fleets" / self.name

    @property
    def database(self) -> Path:
        return self.directory / "state.sqlite"

    @property
    def fleet_file(self) -> Path:
        """Copy of the fleet file as it was at the last `up`, variables unexpanded."""
        return self.directory / "fleet.yaml"

    @property
    def applied_file(self) -> Path:
        """Copy of the last fleet file that was applied without an error."""
        return self.directory / "applied.yaml"

    @property
    def previous_file(self) -> Path:
        """Copy of the one before it."""
        return self.directory / "previous.yaml"

    @property
    def origin(self) -> Path:
        """Records where that file is, and what its relative paths are relative to."""
        return self.directory / "origin.json"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def supervisor_log(self) -> Path:
        return self.log("supervisor")

    @property
    def supervisor_lock(self) -> Path:
        """Held with flock by the live supervisor."""
        return self.directory / "supervisor.lock"

    @property
    def socket(self) -> Path:
        """The supervisor's unix socket; under /tmp if the path is too long."""
        path = self.directory / "supervisor.sock"
        if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH_BYTES:
            return path
        return _short(path, ".sock")

    @property
    def scratch(self) -> Path:
        """TMPDIR of the fleet's processes; elsewhere if a socket's path would be too long."""
        path = self.directory / "tmp"
        if len(os.fsencode(path)) <= _LONGEST_SCRATCH_PATH_BYTES:
            return path
        return _short(path, ".tmp")

    def hold_file(self, server: str) -> Path:
        """Exists while a starting server must not answer yet (engines/inside/guard.py)."""
        return self.directory / f"{server}.held"

    @property
    def compiled(self) -> Path:
        """What torch compiled for servers: kept for all fleets of this root, and for no other user,
        since servers execute it.
        """
        return self.root / "compiled"

    @property
    def control_token(self) -> Path:
        """Mode 0600: the token that opens every route of the fleet's servers."""
        return self.directory / "control.token"

    @property
    def api_key(self) -> Path:
        """Mode 0600: the inference key, if the fleet file names none of its own."""
        return self.directory / "api.key"

    @property
    def tinker(self) -> Path:
        """The ledger and the checkpoints of the Tinker API, unless the fleet file says where."""
        return self.directory / "tinker"

    @property
    def tinker_key(self) -> Path:
        """Mode 0600: the key of the Tinker API."""
        return self.directory / "tinker.key"

    @property
    def supervisor_token(self) -> Path:
        """Mode 0600: the token for other machines, if the fleet file names no file for it."""
        return self.directory / "supervisor.token"

    @property
    def supervisor_cert(self) -> Path:
        """The certificate that skyctl made for the supervisor, if the fleet file names none."""
        return self.directory / "supervisor.pem"

    @property
    def supervisor_key(self) -> Path:
        """Mode 0600: its key."""
        return self.directory / "supervisor.key"

    @property
    def shared(self) -> Path | None:
        """Holds the fleet's own copies of weights where the fleet file has a `shared_dir`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._shared.readlink()
        return None

    @property
    def _shared(self) -> Path:
        return self.directory / "shared"

    @property
    def _copies(self) -> Path:
        return self.shared or self.directory

    @property
    def staging(self) -> Path:
        """Weights that came out of a trainer's memory, kept until they are replaced."""
        return self._copies / "weights"

    @property
    def kept(self) -> Path:
        """Copies of checkpoints, kept until they are forgotten."""
        return self._copies / "kept"

    @property
    def adapters(self) -> Path:
        """The fleet's own copies of the LoRA adapters that it serves."""
        return self._copies / "adapters"

    def share(self, directory: Path | None) -> None:
        """Keep copies in a new directory below `directory`, which other fleets may use as well;
        None: in this fleet's own.

        Raises:
            SkyctlError: it cannot be made.
        """
        self.leave_shared()
        self._shared.unlink(missing_ok=True)
        if directory is not None:
            place = directory / f"{self.name}-{os.urandom(4).hex()}"
            self._shared.symlink_to(private_directory(place))

    def leave_shared(self) -> None:
        """Remove the fleet's directory below `shared_dir`, unless something is kept there."""
        place = self.shared
        if place is None:
            return
        with contextlib.suppress(OSError):  # not empty, or not there any more
            for directory in (self.staging, self.adapters, self.kept, place):
                with contextlib.suppress(FileNotFoundError):
                    directory.rmdir()
            self._shared.unlink()

    def log(self, name: str) -> Path:
        """Log file of one server, `router`, `tinker` or `supervisor`."""
        return self.logs / f"{name}.log"

    def refuse_foreign(self) -> None:
        """Raise SkyctlError if another user could answer for this fleet's supervisor."""
        for path in {self.directory, self.socket.parent, self.scratch.parent}:
            if os.path.lexists(path):
                owned_directory(path)

    def prepare(self) -> FleetPaths:
        """Create and check every directory of this fleet."""
        own = (self.root, self.root / "fleets", self.directory, self.logs)
        # the last two are elsewhere only if their paths would be too long
        for path in dict.fromkeys((*own, self.socket.parent, self.scratch.parent)):
            private_directory(path)
        return self


def _short(path: Path, suffix: str) -> Path:
    """The substitute for `path` in this user's directory under /tmp. It is the same for every
    process: commands of other terminals, and the fleet's own, may have another TMPDIR.
    """
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return _EVERYBODYS / f"skyctl-{os.getuid()}" / f"{digest}{suffix}"


def fleet_paths(name: str, environ: Mapping[str, str] | None = None) -> FleetPaths:
    """Paths of the fleet `name` under this user's state root."""
    return FleetPaths(state_root(environ), name)


def advice(path: Path, reason: str) -> str:
    """What to do about a state file that cannot be written because of `reason`."""
    if "full" in reason or "No space" in reason or "quota" in reason:
        return f"free space at {path.parent}"
    return f"make {path.parent} writable, or point SKYCTL_HOME elsewhere"
