"""Placeholder."""


def validate() -> None:
    """Placeholder."""
    raise NotImplementedError
