"""Placeholder."""


def schema() -> None:
    """Placeholder."""
    raise NotImplementedError
