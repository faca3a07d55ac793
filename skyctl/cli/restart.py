"""Placeholder."""


def restart() -> None:
    """Placeholder."""
    raise NotImplementedError
