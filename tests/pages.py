"""What pages and the dashboard have in them, for the tests that run it or compare it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
DASHBOARD = DOCS / "grafana-dashboard.json"
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
# what Prometheus clients add to the name that is in the source
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def block(page: str, heading: str, language: str) -> str:
    """The first block of this language below a heading of a page in docs/."""
    _, found, below = (DOCS / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    return next(code for name, code in _FENCED.findall(below) if name == language)


def marked_blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of a page that tests of all pages leave out: the reason, and the block."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        (reason, code)
        for reason, code in re.findall(
            r"^<!-- not run: (.*) -->\n```\w+\n(.*?)^```$", text, re.M | re.S
        )
    ]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def expressions() -> list[str]:
    return [t["expr"] for panel in dashboard()["panels"] for t in panel.get("targets", [])]


def metrics(prefix: str) -> set[str]:
    """Names with this prefix in all expressions, as the source spells them."""
    found = re.findall(rf"\b{prefix}\w+", " ".join(expressions()))
    return {_SUFFIX.sub("", name) for name in found}


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """client → the methods that work, those that are refused."""
    page = (DOCS / "how-to" / "tinker.md").read_text(encoding="utf-8")
    table = page.partition("## What the SDK's methods do here")[2]
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|(.*?)\|$", table, re.M)
    return {
        name: (set(re.findall(r"`(\w+)`", a)), set(re.findall(r"`(\w+)`", b)))
        for name, a, b in rows
    }
