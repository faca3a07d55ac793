"""Which fleet of a group that shares its GPUs may be awake: one name on disk, for all its fleets.

The name changes only once no server of the fleet before it is awake, so that a death at any moment
leaves at most one fleet awake.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from skyctl.errors import ConflictError, SkyctlError
from skyctl.store.locks import Lock, Locks
from skyctl.store.paths import place_private_file, private_directory, sync_directory

_SWITCH = "switch"
_PATIENCE_S = 2.0


class SleepGroup:
    """One group, below a state root. Fleets of other state roots are not in it."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self._directory = root / "sleep-groups" / name
        self._file = self._directory / "awake"

    def awake(self) -> str:
        """The fleet that may be awake; "" if there is none yet.

        Raises:
            SkyctlError: the disk does not say.
        """
        try:
            name = self._file.read_text().strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise self._unknown(str(error)) from error
        if not name:
            raise self._unknown(f"{self._file} is empty")
        return name

    def _unknown(self, problem: str) -> SkyctlError:
        return SkyctlError(
            f"which fleet of sleep_group {self.name} may be awake is not known: {problem}",
            hint=f"once its fleets are down: rm {self._file}",
        )

    def give(self, fleet: str) -> None:
        """Let this fleet be awake, durably. No server of another may be.

        Raises:
            StateUnwritable: it cannot be written; the fleet before it may still be awake.
        """
        private_directory(self._directory)
        place_private_file(self._file, fleet.encode(), replace=True)
        with suppress(OSError):  # a rename that is lost leaves the fleet before it
            sync_directory(self._directory)

    def switching(self, activity: str) -> AbstractAsyncContextManager[Lock]:
        """The lock of whoever decides which fleet is awake. Raises ConflictError if another command
        still does after `_PATIENCE_S`.
        """
        private_directory(self._directory)
        locks = _SwitchLocks(self._directory)
        return locks.hold(_SWITCH, activity, wait_s=_PATIENCE_S)


class _SwitchLocks(Locks):
    directory_stands_in = False

    def conflict(self, name: str) -> ConflictError:
        holders = " and ".join(map(str, self.holders(name))) or "another command"
        return ConflictError(
            f"the fleets of sleep_group {self.fleet} are being switched by {holders}",
            hint="look: skyctl ls; then try again",
        )
