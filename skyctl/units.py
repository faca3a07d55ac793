"""Byte sizes, durations and counts as people write and read them."""

from __future__ import annotations

import contextlib
import math
import re
import time
from datetime import datetime

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_LONGEST = 64  # in characters; keeps float() finite
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)([smhd])$")
LEAST_STAGE_RATE = 10_000_000
"""Bytes per second: with less, a sender's deadlines would have to be hours."""
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str | int) -> int:
    """Bytes from `268435456`, `256MiB`, `1.5GB` or `64k` (a bare k/m/g/t is binary).

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 256MiB or 1.5GB")
    number, unit, binary = match.groups()
    has_b = match.string.strip().lower().endswith("b")
    base = 1000 if (unit and has_b and not binary) else 1024
    return int(float(number) * base ** _POWERS[unit.lower()])


def parse_duration(text: str) -> float:
    """Seconds, from `90s`, `10m`, `2h` or `1d`.

    Raises:
        ValueError: the text is not a duration.
    """
    match = _DURATION.match(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it like 90s or 10m")
    return float(match[1]) * _UNIT_S[match[2]]


def parse_moment(text: str) -> float:
    """Seconds since the epoch, from a time before now (`90s`, `10m`, `2h`, `1d`) or an ISO 8601
    time, which is local unless it says otherwise.

    Raises:
        ValueError: the text is neither.
    """
    with contextlib.suppress(ValueError):
        return time.time() - parse_duration(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is not a time; write it like 10m or 2026-01-31T18:00") from None


def finite_or(text: str, default: float) -> float:
    """The finite number that `text` is, else `default`."""
    try:
        number = float(text)
    except ValueError:
        return default
    return number if math.isfinite(number) else default


def format_bytes(count: float) -> str:
    """`256.0 MiB`: binary units, one decimal from KiB up."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_rate(gb_per_s: float) -> str:
    """`52.10 GB/s`, or `4.2 MB/s` for small rates; from 10^9 bytes per second."""
    return f"{gb_per_s:.2f} GB/s" if gb_per_s >= 0.1 else f"{gb_per_s * 1000:.1f} MB/s"


def percent(share: float) -> str:
    """`10%`, `2.5%`."""
    return f"{share * 100:.3g}%"


def format_seconds(seconds: float) -> str:
    """`42 ms`, `3.4 s`, `2m05s`, `3h12m`, `2d04h`: two significant parts."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, full_seconds = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{full_seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


def format_ago(at: float) -> str:
    """`3.4 s ago`, from seconds since the epoch."""
    return f"{format_seconds(max(0.0, time.time() - at))} ago"


def waits_for(requests: int) -> str:
    """`waits for 2 requests`; "" for none."""
    return f"waits for {count_of(requests, 'request')}" if requests else ""


def count_of(number: int, noun: str) -> str:
    """`1 server`, `2 servers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
