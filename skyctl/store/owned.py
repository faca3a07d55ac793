"""Descriptors that belong to one process: a lock, a helper's pipe, a connection.

A program that skyctl starts gets none of them: exec closes them. A process that is only forked,
such as a trainer's data loader, gets a copy of each. A lock would last until that child ends, and
the other end of a pipe would not notice that the parent has died. A forked child therefore replaces
its copies by /dev/null: the numbers stay taken, because objects that it inherits may close them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self
from weakref import WeakSet

from skyctl.errors import SkyctlError

if TYPE_CHECKING:
    from asyncio.subprocess import Process


class HasDescriptor(Protocol):
    """`fileno` returns a negative number, or raises ValueError, once it is closed."""

    def fileno(self) -> int: ...


_owners: WeakSet[HasDescriptor] = WeakSet()
_in_child: list[Callable[[], None]] = []
_opening = threading.RLock()


def own(owner: HasDescriptor) -> None:
    """Keep the descriptor of `owner`, as long as that is open, from children that are forked."""
    with _opening:
        _owners.add(owner)


def own_stdin(process: Process) -> None:
    """Keep the pipe to a helper, which ends when that is closed, from children that are forked."""
    assert process.stdin is not None  # a pipe
    own(process.stdin.get_extra_info("pipe"))


def after_fork_in_child(forget: Callable[[], None]) -> None:
    """Call `forget` in every forked child, which must not take its parent's state for its own."""
    _in_child.append(forget)


@contextmanager
def unforked() -> Iterator[None]:
    """No other thread forks while the block runs. It opens a descriptor and passes it to `own`; it
    must not wait for anything.
    """
    with _opening:
        yield


class FileLock:
    """A file or directory to be locked (flock), until `close` or the end of this process."""

    def __init__(self, path: Path, open_file: Callable[[], int]) -> None:
        self._path = path
        with unforked():
            self._descriptor = open_file()
            own(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._descriptor

    def take(self, *, shared: bool = False, wait: bool = False) -> bool:
        """Whether it is locked now; without `wait` another process may have it.

        Raises:
            SkyctlError: this file system cannot lock, or has no room for more locks.
        """
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(self._descriptor, kind)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SkyctlError(
                f"cannot lock {self._path}: {error.strerror}, and nothing else keeps two commands "
                "apart",
                hint="point SKYCTL_HOME at a directory on a local disk",
            ) from error
        return True

    def close(self) -> None:
        """Unlock and close it. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # closing alone would keep the lock for a child that some C library has forked
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _drop_inherited() -> None:
    _opening._at_fork_reinit()  # type: ignore[attr-defined] # as concurrent.futures does
    owners = list(_owners)
    _owners.clear()
    for owner in owners:
        with contextlib.suppress(OSError, ValueError):
            descriptor = owner.fileno()
            if descriptor < 0:
                continue
            os.close(descriptor)
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            if nothing != descriptor:
                os.dup2(nothing, descriptor, inheritable=False)
                os.close(nothing)
    for forget in _in_child:
        forget()


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_drop_inherited
)
