"""What `serve` uses of `sglang.srt.utils`."""


def kill_process_tree(pid: int, include_parent: bool = True) -> None:
    """There are no children here."""
