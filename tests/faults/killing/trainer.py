"""Who pushes: every checkpoint from a directory of its own, or all from one that is overwritten."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


class Trainer:
    """Writes the next checkpoint before each push.

    `overwrites`: all go to `latest`, into the files that are there, as RL loops do. There are three
    checkpoints then: the fleet's, the next, and one that is written before the first two are safe.
    """

    def __init__(self, sources: Mapping[str, Path], *, overwrites: bool) -> None:
        """Raises ValueError with fewer than three checkpoints to overwrite each other."""
        if overwrites and len(sources) < 3:
            raise ValueError("a directory that is overwritten needs three checkpoints")
        self._sources = dict(sources) if overwrites else dict(list(sources.items())[:2])
        self.overwrites = overwrites
        self.names = tuple(self._sources)
        self.at = self.names[-1]
        self._latest = next(iter(sources.values())).with_name("latest")

    def next(self) -> str:
        """Write the checkpoint after this one; its directory."""
        self.at = self.names[(self.names.index(self.at) + 1) % len(self.names)]
        source = self._sources[self.at]
        if not self.overwrites:
            return str(source)
        self._latest.mkdir(exist_ok=True)
        for file in source.iterdir():
            shutil.copyfile(file, self._latest / file.name)
        return str(self._latest)


def stub_checkpoints(directory: Path) -> dict[str, Path]:
    """Three checkpoints that stubs take, by name."""
    seeds = {"a": 50, "b": 90, "c": 130}
    return {
        name: write_checkpoint(directory / name, tiny_tensors(seed)) for name, seed in seeds.items()
    }
