"""URLs of fleets, and a trainer's reading of a command line."""

from __future__ import annotations

from typing import Any

import yaml

from skyctl.core.urls import Access, FleetUrls

URLS = FleetUrls(
    name="demo",
    model="org/model-7b",
    router="http://127.0.0.1:8000",
    servers={"demo-0": "http://127.0.0.1:8001", "demo-1": "http://[::1]:8002"},
    router_metrics="http://127.0.0.1:9000",
    access=Access(api_key_env="DEMO_KEY"),
)
BARE = FleetUrls("bare", None, None, {"bare-0": "https://gpu7:8001"}, trainer="http://gpu7:8001")


def overrides(text: str) -> dict[str, Any]:
    """`key=value` lines as OmegaConf's and Hydra's command lines take them: values are YAML."""
    lines = text.split()  # as a shell cuts what it substitutes
    assert lines == text.splitlines()
    return {key: yaml.safe_load(value) for key, _, value in (x.partition("=") for x in lines)}
