"""The local cache of the Hugging Face hub: what a model's name means there. Nothing is downloaded.

models--ORG--NAME/refs/REVISION       the commit that a branch or tag meant when it was fetched
models--ORG--NAME/snapshots/COMMIT/   that commit's files, links to blobs/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAIN = "main"
_NAME = re.compile(r"(?P<model>(?:[\w.-]+/)?[\w.-]+)(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?")


@dataclass(frozen=True)
class HubReference:
    """A model on the hub, as `ORG/NAME@REVISION`."""

    model: str
    """`ORG/NAME`, of old models only a name."""
    revision: str = MAIN
    """A branch, a tag or a commit."""

    @classmethod
    def parse(cls, text: str) -> HubReference | None:
        """None for what cannot be the name of a model on the hub."""
        match = _NAME.fullmatch(text)
        if match is None or {".", ".."} & set(re.split("[/@]", text)):
            return None
        return cls(match["model"], match["revision"] or MAIN)

    def __str__(self) -> str:
        return f"{self.model}@{self.revision}"

    def commit(self, environ: Mapping[str, str]) -> str | None:
        """The commit that the revision means in the local cache; None if it is not there."""
        repository = self._repository(environ)
        try:
            commit = (repository / "refs" / self.revision).read_text().strip()
        except (OSError, ValueError):
            commit = self.revision
        if not commit or "/" in commit or not (repository / "snapshots" / commit).is_dir():
            return None
        return commit

    def snapshot(self, environ: Mapping[str, str]) -> Path | None:
        """The directory of its files; None if it is not in the local cache."""
        commit = self.commit(environ)
        return None if commit is None else self._repository(environ) / "snapshots" / commit

    def _repository(self, environ: Mapping[str, str]) -> Path:
        return _cache(environ) / f"models--{self.model.replace('/', '--')}"


def _cache(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it downloads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    root = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = environ.get("HF_HOME") or Path(root) / "huggingface"
    return Path(home).expanduser() / "hub"
