"""Short texts that `skyctl help TOPIC` prints: one file per topic, title in its first line."""

from __future__ import annotations

from importlib.resources import files

from skyctl.errors import NotFoundError


def topics() -> dict[str, str]:
    """Title by topic name, sorted by name."""
    titles = sorted(
        (entry.name.removesuffix(".txt"), entry.read_text("utf-8").partition("\n")[0])
        for entry in files(__name__).iterdir()
        if entry.name.endswith(".txt")
    )
    return dict(titles)


def text_of(topic: str) -> str:
    """One topic's text.

    Raises:
        NotFoundError: there is no such topic; the hint lists them.
    """
    if topic not in topics():
        raise NotFoundError(
            f"there is no help on {topic!r}",
            hint=f"topics: {', '.join(topics())}; a command's own: skyctl COMMAND --help",
        )
    return (files(__name__) / f"{topic}.txt").read_text("utf-8")
