"""What `urls --format` prints is read as its reader reads it, key by key.

The keys and types below were read in the projects' sources, at the commits the formats cite. Where
a project is installed, its own schema takes the output as well.
"""

from __future__ import annotations

import json
import os
import tomllib
import typing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import typing_extensions

from skyctl.core.service import FleetService
from skyctl.core.urls import (
    FORMATS,
    Access,
    FleetUrls,
    notes,
    refused_rollouts,
    target_groups,
    write_targets,
)
from skyctl.errors import UsageError
from skyctl.http.client import ControlClient
from skyctl.service.endpoint import without_token_route
from tests.stub.through_httpx import ThroughHttpx
from tests.unit.core.urls import BARE, URLS, overrides

# SkyRL: InferenceEngineConfig and PlacementConfig, skyrl/train/config/config.py
SKYRL = {
    "generator.inference_engine.run_engines_locally": bool,
    "generator.inference_engine.external_proxy_url": str,
    "generator.inference_engine.external_server_urls": list,
    "generator.inference_engine.served_model_name": str,
    "trainer.placement.colocate_all": bool,
}
# prime-rl: ClientConfig (extras forbidden), prime_rl/configs/shared.py
PRIME_RL_CLIENT = {"base_url": str, "admin_base_url": list, "api_key_var": str}


def test_skyrl_gets_its_data_and_control_planes() -> None:
    found = overrides(FORMATS["skyrl"](URLS))
    assert {key: type(value) for key, value in found.items()} == SKYRL
    engine = "generator.inference_engine"
    assert found[f"{engine}.external_proxy_url"] == URLS.router
    assert found[f"{engine}.external_server_urls"] == list(URLS.servers.values())
    assert found[f"{engine}.run_engines_locally"] is False
    assert found["trainer.placement.colocate_all"] is False


def test_skyrl_makes_its_own_router_for_a_fleet_without_one() -> None:
    found = overrides(FORMATS["skyrl"](replace(BARE, trainer=None)))
    assert "generator.inference_engine.external_proxy_url" not in found
    assert found["generator.inference_engine.external_server_urls"] == ["https://gpu7:8001"]


def test_skyrls_own_schema_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # it is written for Python 3.12; before that, Pydantic wants this one
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    config = pytest.importorskip("skyrl.train.config.config", reason="SkyRL is not installed")
    omegaconf = pytest.importorskip("omegaconf")
    # as SkyRLTrainConfig.from_cli_overrides does, part by part: the whole wants Ray
    found = omegaconf.OmegaConf.from_cli(FORMATS["skyrl"](URLS).split())
    build, engine = config.build_nested_dataclass, found.generator.inference_engine
    taken = build(config.InferenceEngineConfig, engine)
    assert taken.external_proxy_url == URLS.router
    assert list(taken.external_server_urls) == list(URLS.servers.values())
    assert taken.run_engines_locally is False
    assert build(config.PlacementConfig, found.trainer.placement).colocate_all is False
    with pytest.raises(ValueError, match=r"external_server_url\b"):
        build(config.InferenceEngineConfig, {"external_server_url": "http://127.0.0.1:8001"})


OPEN = replace(URLS, trainer="http://127.0.0.1:8791", access=Access())
KEYED = replace(OPEN, access=Access(api_key_file="/s/key", control_token_file="/s/token"))


def test_skyrl_has_the_fleet_url_for_its_only_server(monkeypatch: pytest.MonkeyPatch) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    monkeypatch.setenv("SKYCTL_FLEET_URL", "http://trainer:t@127.0.0.1:8791")
    by_variable = os.environ["SKYCTL_FLEET_URL"]
    control = Access(control_token_file="/s/token")
    for urls, proxy, server in (
        (OPEN, URLS.router, OPEN.trainer),
        (replace(OPEN, router=None), OPEN.trainer, OPEN.trainer),
        (replace(OPEN, access=control), URLS.router, by_variable),
        (KEYED, by_variable, by_variable),
    ):
        found = omegaconf.OmegaConf.from_cli(FORMATS["skyrl"](urls).split())
        plain = omegaconf.OmegaConf.to_container(found, resolve=True)  # as SkyRL reads it
        engine = plain["generator"]["inference_engine"]
        assert (engine["external_proxy_url"], engine["external_server_urls"]) == (proxy, [server])
    assert notes("skyrl", OPEN) == []
    assert "urls --format trainer" in notes("skyrl", KEYED)[0]


def test_prime_rl_has_the_fleet_url_for_its_admin_calls() -> None:
    for urls, base, variable in (
        (OPEN, f"{URLS.router}/v1", None),
        (KEYED, "http://127.0.0.1:8791/v1", "SKYCTL_TRAINER_TOKEN"),
    ):
        client = tomllib.loads(FORMATS["prime-rl"](urls))["orchestrator"]["model"]["client"]
        assert client["admin_base_url"] == ["http://127.0.0.1:8791/v1"]
        assert (client["base_url"], client.get("api_key_var")) == (base, variable)
    [note] = notes("prime-rl", KEYED)
    assert note.endswith('export SKYCTL_TRAINER_TOKEN="$(cat /s/token)"')


def test_prime_rl_gets_its_clients_and_the_models_name() -> None:
    found = tomllib.loads(FORMATS["prime-rl"](URLS))
    client = found["orchestrator"]["model"]["client"]
    assert {key: type(value) for key, value in client.items()} == PRIME_RL_CLIENT
    assert client["base_url"] == f"{URLS.router}/v1"
    assert client["admin_base_url"] == [f"{url}/v1" for url in URLS.servers.values()]
    assert client["api_key_var"] == "DEMO_KEY"
    assert found["model"] == {"name": URLS.model}


def test_prime_rls_own_schema_takes_it() -> None:
    shared = pytest.importorskip("prime_rl.configs.shared", reason="prime-rl is not installed")
    client = tomllib.loads(FORMATS["prime-rl"](URLS))["orchestrator"]["model"]["client"]
    assert shared.ClientConfig(**client).base_url == client["base_url"]


def test_env_quotes_what_a_shell_would_expand() -> None:
    odd = FleetUrls("odd", "m", None, {"odd-0": "http://h:1/$x"})
    assert FORMATS["env"](odd).splitlines() == [
        "export OPENAI_BASE_URL='http://h:1/$x/v1'",
        "export SKYCTL_SERVER_URLS='http://h:1/$x'",
        "export SKYCTL_MODEL=m",
        "export OPENAI_API_KEY=EMPTY",
    ]


def test_openai_clients_find_their_variables() -> None:
    found = dict(line.split("=", 1) for line in FORMATS["openai"](URLS).splitlines())
    assert found == {
        "OPENAI_BASE_URL": "http://127.0.0.1:8000/v1",
        "OPENAI_API_KEY": "${DEMO_KEY}",
        "OPENAI_MODEL": "org/model-7b",
    }
    assert "OPENAI_API_KEY=EMPTY" in FORMATS["openai"](BARE)


def test_the_openai_client_takes_its_variables_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    for line in FORMATS["openai"](BARE).splitlines():
        monkeypatch.setenv(*line.split("=", 1))
    client = openai.OpenAI()
    assert str(client.base_url) == "https://gpu7:8001/v1/" and client.api_key == "EMPTY"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_fleet_without_router_or_model_has_every_format(name: str) -> None:
    assert "gpu7:8001" in FORMATS[name](BARE) and "None" not in FORMATS[name](BARE)


def test_the_fleet_url_takes_its_password_from_the_tokens_file() -> None:
    with pytest.raises(UsageError, match="no fleet URL for trainers"):
        FORMATS["trainer"](URLS)
    access = Access(control_token_file="/home/me/a b")
    line = FORMATS["trainer"](replace(BARE, access=access))
    assert line == """export SKYCTL_FLEET_URL="http://trainer:$(cat '/home/me/a b')@gpu7:8001\""""


def test_a_fleet_without_servers_is_refused() -> None:
    with pytest.raises(UsageError, match="neither a router nor a server"):
        FORMATS["env"](FleetUrls("none", None, None, {}))


def test_prometheus_gets_every_server_and_the_routers_metrics(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    assert write_targets(URLS, path) == 3
    groups = json.loads(path.read_text())
    assert groups == target_groups(URLS)
    assert [g["targets"] for g in groups] == [
        ["127.0.0.1:8001"],
        ["[::1]:8002"],
        ["127.0.0.1:9000"],
    ]
    assert groups[2]["labels"] == {
        "fleet": "demo",
        "server": "router",
        "role": "router",
        "model": "org/model-7b",
    }
    # Prometheus: labels are strings
    assert all(isinstance(v, str) for group in groups for v in group["labels"].values())
    assert target_groups(BARE)[0]["labels"]["__scheme__"] == "https"


def test_the_file_is_replaced_whole_and_may_be_read_by_prometheus(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    write_targets(URLS, path)
    with path.open() as before:
        write_targets(BARE, path)
        assert len(json.load(before)) == 3, "changed under a reader"
    assert len(json.loads(path.read_text())) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["targets.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_prometheus_would_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only when they end in") as caught:
        write_targets(URLS, tmp_path / "targets.txt")
    assert "targets.json" in caught.value.hint
    with pytest.raises(UsageError, match="No such file or directory"):
        write_targets(URLS, tmp_path / "absent" / "targets.json")


@pytest.mark.parametrize(
    ("statuses", "warned"),
    [
        ((400, 422), ""),
        ((403, 422), "SkyRL's rollouts will fail: demo-0 refuses /inference/v1/generate"),
        ((403, 404), "SkyRL's rollouts will fail: demo-0, demo-1 refuse /inference/v1/generate"),
        ((0, 403), "SkyRL's rollouts will fail: demo-1 refuses"),
    ],
)
async def test_servers_that_would_refuse_skyrls_rollouts_are_named(
    statuses: tuple[int, int], warned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_TOKEN", "t0ken")

    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/inference/v1/generate")
        assert request.headers["authorization"] == "Bearer t0ken"
        status = statuses[request.url.port == 8002]
        if not status:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, json={"error": {"message": "Scale-out is disabled"}})

    class Known(FleetService):
        async def urls(self) -> FleetUrls:
            return replace(URLS, access=Access(control_token_env="DEMO_TOKEN"))

    fleet = Known()
    async with ControlClient(transport=ThroughHttpx(httpx.MockTransport(answer))) as client:
        warning = refused_rollouts(await without_token_route(fleet, client))
    assert warning.startswith(warned) and bool(warning) == bool(warned)
    assert not warning or "`enable-scale-out: true` under `args:`" in warning
