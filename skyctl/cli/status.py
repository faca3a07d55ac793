"""Placeholder."""


def status() -> None:
    """Placeholder."""
    raise NotImplementedError
