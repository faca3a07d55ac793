"""Placeholder."""


def logs() -> None:
    """Placeholder."""
    raise NotImplementedError
