"""Labels of weight versions: what a word means, and what it was given to before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skyctl.errors import UsageError
from skyctl.push.request import PushRequest
from skyctl.store.journal import PushRecord


def reused_label(request: PushRequest, pushes: Sequence[PushRecord]) -> str:
    """A warning when the request's label stood for another checkpoint until now, else "".

    `pushes` are newest first.
    """
    label = request.weight_version
    before = next((push for push in pushes if push.ok and push.version == label), None)
    if not label or before is None or before.checkpoint == request.checkpoint:
        return ""
    return (
        f"version {label} was {before.checkpoint} until now ({before.job}); "
        "a label of its own tells the two apart"
    )


def means(word: str, version: str) -> bool:
    """Whether `word` is the version, or its name without the digest."""
    return word in (version, version.rpartition("@")[0])


def meant(word: str, versions: Iterable[str]) -> str:
    """The version that `word` means: itself, or the only `word@digest` among `versions`.

    A word that means none is returned as it is.

    Raises:
        UsageError: it may be any of several.
    """
    known = dict.fromkeys(versions)
    found = [version for version in known if means(word, version)]
    if word in known or not found:
        return word
    if len(found) > 1:
        raise UsageError(
            f"version {word} may be any of {len(found)}", hint=f"one of: {', '.join(found)}"
        )
    return found[0]
