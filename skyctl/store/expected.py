"""Which weights have which digest: learned from pushes and launches, enforced from then on.

A version's label is only a name. A server is known to hold certain weights if its digest is the one
that the same content had before, in servers that hold the model in the same arrangement
(`push/verify.py`) and run the same engine version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ExpectedDigest:
    """The digest of a content in an engine.

    `content` names the bytes (`push/verify.py`), `engine` its version and, if known, its
    arguments. `digest` ends in its arrangement. `origin`: a push whose servers agreed and matched
    the checkpoint, or vLLM's own loading at a launch.
    """

    content: str
    engine: str
    digest: str
    origin: Literal["push", "launch"] = "push"

    @property
    def arrangement(self) -> str:
        return self.digest.partition(":")[2]


@dataclass(frozen=True)
class BrokenReload:
    """A model (the layout digest of its checkpoints) whose weights get another digest when pushed
    than when vLLM loads them; `model` is its name at that time.
    """

    layout: str
    engine: str
    model: str


@dataclass(frozen=True)
class Expectations:
    """All digests that a fleet remembers."""

    digests: tuple[ExpectedDigest, ...] = ()
    broken: tuple[BrokenReload, ...] = ()

    def with_learned(self, rows: Iterable[Mapping[str, Any]]) -> Expectations:
        """These and what a push has learned; newer ones come first."""
        learned = tuple(ExpectedDigest(**row) for row in rows)
        return Expectations((*learned, *self.digests), self.broken)


@dataclass
class Learned:
    """What one push found out. Its JSON is part of the push's result and of its error."""

    digests: list[ExpectedDigest] = field(default_factory=list)
    broken: BrokenReload | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "digests": [asdict(digest) for digest in self.digests],
            "broken": self.broken and asdict(self.broken),
        }


def by_files(identity_digest: str) -> str:
    """Names the bytes of a checkpoint's files as long as no process writes to them."""
    return f"files:{identity_digest}"
