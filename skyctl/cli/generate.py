"""Placeholder."""


def generate() -> None:
    """Placeholder."""
    raise NotImplementedError
