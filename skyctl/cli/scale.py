"""Placeholder."""


def scale() -> None:
    """Placeholder."""
    raise NotImplementedError
