"""Placeholder."""


def plan() -> None:
    """Placeholder."""
    raise NotImplementedError
