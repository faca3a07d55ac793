"""Placeholder."""


def sleep() -> None:
    """Placeholder."""
    raise NotImplementedError


def wake() -> None:
    """Placeholder."""
    raise NotImplementedError
