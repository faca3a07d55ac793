"""Rates for a forecast: out of the fleet's last push by the same transport, and from the files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.push.forecast import Measured
from skyctl.store.journal import PushRecord

_SAMPLE_BYTES = 128 * 1024 * 1024
_PIECE_BYTES = 4 * 1024 * 1024
_SAMPLE_S = 0.5
_LEAST_S = 1e-4


def measured_before(pushes: Iterable[PushRecord], transport: str) -> Measured:
    """Of the newest push by `transport` that went well into all its servers at once."""
    for push in pushes:
        result = push.result
        if not push.ok or result.get("transport") != transport:
            continue
        if "drain" in result.get("stages", {}):
            continue  # its servers left the router: parts, or a canary, are in its freeze
        update_s = float(result.get("stages", {}).get("update", 0.0))
        freeze_s = float(result.get("freeze_window_s", 0.0))
        if update_s > _LEAST_S and freeze_s > update_s and result.get("total_bytes"):
            return Measured(
                fixed_s=freeze_s - update_s,
                loads=result["total_bytes"] / update_s,
                source=push.job,
            )
    return Measured()


def measure_reading(checkpoint: Checkpoint) -> float | None:
    """Bytes per second at which the first shards are read now, for half a second at most.

    None where they are too small to tell. What lies in the page cache is read from there, as the
    push would.
    """
    buffer = memoryview(bytearray(_PIECE_BYTES))
    done, began = 0, time.perf_counter()
    for shard in checkpoint.shards:
        descriptor = os.open(shard.path, os.O_RDONLY)
        try:
            at = 0
            while done < _SAMPLE_BYTES and time.perf_counter() - began < _SAMPLE_S:
                got = os.preadv(descriptor, [buffer], at)
                if got <= 0:
                    break
                at, done = at + got, done + got
        finally:
            os.close(descriptor)
    taken_s = time.perf_counter() - began
    return done / taken_s if done >= _PIECE_BYTES and taken_s > _LEAST_S else None
