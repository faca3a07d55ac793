"""Placeholder."""


def init() -> None:
    """Placeholder."""
    raise NotImplementedError
