"""Placeholder."""


def urls() -> None:
    """Placeholder."""
    raise NotImplementedError
