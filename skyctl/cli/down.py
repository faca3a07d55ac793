"""Placeholder."""


def down() -> None:
    """Placeholder."""
    raise NotImplementedError
