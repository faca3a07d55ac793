"""Placeholder."""


def pause() -> None:
    """Placeholder."""
    raise NotImplementedError


def resume() -> None:
    """Placeholder."""
    raise NotImplementedError
