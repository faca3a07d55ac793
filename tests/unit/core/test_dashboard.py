"""Every metric the Grafana dashboard asks for exists in vLLM or in vllm-router."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from skyctl.core.urls import FleetUrls, target_groups
from tests.pages import dashboard, expressions, metrics


def source(module: str) -> Path:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        pytest.skip(f"{module} is not installed")
    return Path(found.origin)


def test_vllm_exports_what_is_asked_of_it() -> None:
    text = (source("vllm").parent / "v1" / "metrics" / "loggers.py").read_text()
    exported = set(re.findall(r'name="(vllm:\w+)"', text))
    # prometheus_client adds _total to counters
    asked = {name.removesuffix("_total") for name in metrics("vllm:")}
    assert len(asked) > 10 and asked <= exported, asked - exported


def test_the_router_exports_what_is_asked_of_it() -> None:
    binary = source("vllm_router_rs").read_bytes()
    asked = metrics("vllm_router_")
    assert len(asked) > 4
    assert not [name for name in asked if name.encode() not in binary]


def test_it_selects_by_the_labels_that_service_discovery_gives() -> None:
    urls = FleetUrls("demo", "m", "http://r:1", {"demo-0": "http://h:1"}, "http://r:2")
    given = {label for group in target_groups(urls) for label in group["labels"]}
    added = {"le", "finished_reason", "sleep_state", "route", "worker"}  # by vLLM and the router
    text = " ".join(expressions())
    asked = set(re.findall(r"(\w+)=~?\"", text))
    for grouping in re.findall(r"by \(([^)]*)\)", text):
        asked |= {label.strip() for label in grouping.split(",")}
    assert asked <= given | added and {"fleet", "role", "server"} <= asked


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not mine & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= mine
