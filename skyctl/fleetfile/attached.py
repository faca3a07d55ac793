"""What has no meaning in the fleet file of servers that skyctl did not start."""

from __future__ import annotations

from collections.abc import Collection

_OF_STARTED = (
    *("replicas", "args", "check_args", "env", "ports", "gpus", "share_gpus", "host"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("nodes_per_replica", "launcher", "ssh", "ray", "restart"),
    *("on_event", "scale", "tinker", "trainer"),
)


def check_attached(written: Collection[str]) -> None:
    """Raise ValueError if a file with `servers` has keys by which servers would be started."""
    if unused := [f"`{key}`" for key in _OF_STARTED if key in written]:
        goes = "go" if len(unused) > 1 else "goes"
        raise ValueError(
            f"{', '.join(unused)} {goes} with servers that skyctl starts, not with `servers`"
        )
