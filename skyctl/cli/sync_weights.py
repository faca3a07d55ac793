"""Placeholder."""


def sync_weights() -> None:
    """Placeholder."""
    raise NotImplementedError
