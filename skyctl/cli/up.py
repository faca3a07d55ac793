"""Placeholder."""


def up() -> None:
    """Placeholder."""
    raise NotImplementedError
