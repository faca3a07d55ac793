"""Seeded mutations of bytes, of JSON-like values, and of text, that know what hurts a parser."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import MutableMapping
from typing import Any

NASTY_NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**64 + 1, -(2**63), 10**40, 10**400,
    0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), True, False,
)  # fmt: skip
NASTY_TEXTS = (
    "", " ", "\x00", "\n", "a\nb: c", "../../etc/passwd", "/etc/passwd", "..", ".", "~", "${HOME}",
    "${", "${A:-", "\u202e", "\ud83d\ude00", "é" * 50, "x" * 5000, "%s%n", "{}", "[]", "null",
    "\ufeff", "1e999", "0x7f", "NaN", "-", "--flag", "a=b", "\\", '"', "'", "&a", "*a",
    "!!python/x",
)  # fmt: skip


def nasty(dice: random.Random, depth: int = 0) -> Any:
    """Any JSON-like value, most of them of the wrong type for wherever they land."""
    choice = dice.randrange(10 if depth < 3 else 7)
    if choice < 3:
        return dice.choice(NASTY_NUMBERS)
    if choice < 6:
        return dice.choice(NASTY_TEXTS)
    if choice == 6:
        return None
    if choice == 7:
        return [nasty(dice, depth + 1) for _ in range(dice.randrange(4))]
    if choice == 8:
        return {dice.choice(NASTY_TEXTS): nasty(dice, depth + 1) for _ in range(dice.randrange(4))}
    return nested(dice.choice((5, 50, 200)), dice.random() < 0.5)


def nested(depth: int, lists: bool) -> Any:
    """A value inside a value inside a value."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def mutated(dice: random.Random, value: Any) -> Any:
    """A copy of a JSON-like value with one to three places changed, dropped, added or moved."""
    value = copy.deepcopy(value)
    for _ in range(dice.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return nasty(dice)
        holder, key = dice.choice(places)
        what = dice.randrange(6)
        if what == 0 and isinstance(holder, dict):
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[dice.choice(NASTY_TEXTS)] = nasty(dice)
        elif what == 2:
            other, name = dice.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                holder[key] = copy.deepcopy(other[name])
        elif what == 3 and type(holder[key]) is int:
            holder[key] += dice.choice((-1, 1, 7, -1000, 2**32))
        else:
            holder[key] = nasty(dice)
    return value


def _places(value: Any) -> Any:
    """Every (container, key) inside a value."""
    items = value.items() if isinstance(value, MutableMapping) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def as_json(dice: random.Random, value: Any) -> bytes:
    """The value as JSON bytes: with NaN where it has one, sometimes with a key twice."""
    text = json.dumps(value, ensure_ascii=dice.random() < 0.5)
    if dice.random() < 0.1 and text.startswith('{"'):
        text = text[:-1] + ", " + text[1:]
    if dice.random() < 0.03:
        deep = dice.choice((1_000, 100_000))
        text = "[" * deep + (text if dice.random() < 0.5 else "") + "]" * deep
    if dice.random() < 0.03:
        text = text.replace("1", "9" * dice.choice((20, 5_000, 20_000)), 1)
    return text.encode("utf-8", "surrogatepass")


def broken(dice: random.Random, data: bytes) -> bytes:
    """The bytes with flips, cuts, runs and doubles, or none of them at all."""
    found = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(found) + 1)
        what = dice.randrange(6)
        if what == 0 and at < len(found):
            found[at] ^= 1 << dice.randrange(8)
        elif what == 1:
            del found[at:]
        elif what == 2:
            found[at:at] = dice.randbytes(dice.randrange(1, 16))
        elif what == 3:
            found[at : at + dice.randrange(1, 64)] = b""
        elif what == 4:
            found[at:at] = found[: dice.randrange(0, 200)]
        elif at < len(found):
            found[at] = dice.choice(b'\x00\xff{}[]":,\n\t -&*!%@`')
    return bytes(found)
