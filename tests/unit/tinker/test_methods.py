"""Every public method of the SDK's clients is in docs/how-to/tinker.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

tinker = pytest.importorskip("tinker")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "tinker.md"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """client → the methods that work, those that are refused."""
    table = PAGE.read_text(encoding="utf-8").partition("## What the SDK's methods do here")[2]
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|(.*?)\|$", table, re.M)
    return {
        name: (set(re.findall(r"`(\w+)`", a)), set(re.findall(r"`(\w+)`", b)))
        for name, a, b in rows
    }


def public(client: type) -> set[str]:
    """Without the deprecated twins that end in _async."""
    names = {name for name in vars(client) if not name.startswith("_")}
    return {name for name in names if name.removesuffix("_async") == name or name[:-6] not in names}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_page_names_every_method(name: str) -> None:
    works, refused = documented()[name]
    assert works | refused == public(getattr(tinker, name))
    assert not works & refused
