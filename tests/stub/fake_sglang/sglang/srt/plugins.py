"""What `serve` uses of `sglang.srt.plugins`."""


def load_plugins() -> None:
    """There are none."""
