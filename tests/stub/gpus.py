"""The memory of GPUs that the servers of several models share: two models in it is an accident, and
is put on record.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

DIRECTORY = "STUB_GPUS"
"""The environment variable with the directory of locks; a lock ends with its process."""
COLLISIONS = "collisions"


class SharedMemory:
    """What one server has of it: nothing, or its model."""

    def __init__(self, directory: Path, model: str) -> None:
        self._directory, self._model = directory, Path(model).name
        self._own = (directory / f"{self._model}.memory").open("a")

    def take(self) -> None:
        fcntl.flock(self._own, fcntl.LOCK_SH)
        with (self._directory / "looking").open("a") as looking:
            fcntl.flock(looking, fcntl.LOCK_EX)  # two that look at once would see each other's look
            self._look()

    def _look(self) -> None:
        for path in self._directory.glob("*.memory"):
            if path.stem == self._model:
                continue
            with path.open("a") as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    with (self._directory / COLLISIONS).open("a") as record:
                        record.write(f"{self._model} beside {path.stem}\n")

    def release(self) -> None:
        fcntl.flock(self._own, fcntl.LOCK_UN)
