"""What names of models mean when a fleet comes up, and how its servers are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import absolute, locate
from skyctl.core.expectations import arguments_of
from skyctl.core.pinning import moved, pin
from skyctl.core.plan import FleetPlan
from skyctl.core.planner import plan_fleet
from skyctl.errors import NotFoundError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.supervisor.wire import spec_hash

OLD, NEW, DRAFT = ("1" * 40, "2" * 40, "d" * 40)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A hub cache with two commits of a model, and one of another."""
    for model, commit, references in (
        ("tiny", OLD, ("v1", "refs-of/pr")),
        ("tiny", NEW, ("main",)),
        ("draft", DRAFT, ("main",)),
    ):
        repository = tmp_path / "hub" / f"models--org--{model}"
        (repository / "snapshots" / commit).mkdir(parents=True)
        for name in references:
            (repository / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / "refs" / name).write_text(commit)
    return {"HF_HOME": str(tmp_path)}


def configured(**more: Any) -> FleetConfig:
    return FleetConfig.model_validate(
        {"name": "demo", "model": "org/tiny", "device": "cpu", "router": {"enabled": False}, **more}
    )


def planned(
    config: FleetConfig, pins: Mapping[str, str], directory: Path = Path("/f")
) -> FleetPlan:
    ports = iter(range(20000, 20100))
    return plan_fleet(
        config, directory, gpus=[], next_port=lambda: next(ports), environ={}, pins=pins
    )


def option(plan: FleetPlan, name: str) -> str | None:
    argv = plan.servers[0].argv
    return argv[argv.index(name) + 1] if name in argv else None


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {"--revision": NEW}),
        ({"revision": "v1"}, {"--revision": OLD}),
        ({"revision": OLD}, {"--revision": OLD}),
        ({"revision": "refs-of/pr"}, {"--revision": OLD}),
        ({"revision": "not-here"}, {"--revision": "not-here"}),
        ({"tokenizer": "org/draft"}, {"--revision": NEW, "--tokenizer-revision": DRAFT}),
        (
            {"tokenizer": "org/other", "revision": "v1"},  # vLLM takes the model's revision there
            {"--revision": OLD, "--tokenizer-revision": "v1"},
        ),
        ({"tokenizer_revision": "v1"}, {"--revision": NEW, "--tokenizer-revision": "v1"}),
        ({"hf-config-path": "org/other"}, {"--revision": None}),  # would get the commit as well
        (
            {"speculative_config": {"model": "org/draft", "num_speculative_tokens": 2}},
            {
                "--speculative-config": '{"model":"org/draft","num_speculative_tokens":2,'
                f'"revision":"{DRAFT}"}}'
            },
        ),
        (
            {"speculative-config": '{"model": "org/draft"}'},
            {"--speculative-config": f'{{"model":"org/draft","revision":"{DRAFT}"}}'},
        ),
        (
            {"speculative-config.model": "org/draft"},
            {"--speculative-config.revision": DRAFT},
        ),
    ],
)
def test_servers_are_started_with_the_commits_that_names_mean(
    environ: dict[str, str], args: dict[str, Any], expected: dict[str, str | None]
) -> None:
    config = configured(args=args)
    plan = planned(config, pin(config, Path("/f"), environ, {}))
    assert {name: option(plan, name) for name in expected} == expected
    assert option(plan, "--model") == plan.served_model_name == "org/tiny"


def test_a_pin_stays_while_the_fleet_is_up_and_is_no_change_of_the_plan(
    environ: dict[str, str], tmp_path: Path
) -> None:
    config = configured()
    before = planned(config, {})  # not downloaded yet
    pins = pin(config, Path("/f"), environ, {})
    after = planned(config, pins)
    assert (before.base, after.base) == ("org/tiny@main", f"org/tiny@{NEW}")
    one, other = before.servers[0], after.servers[0]
    assert spec_hash(one) == spec_hash(replace(other, argv=other.argv))
    assert arguments_of(one) == arguments_of(other)
    assert one.base_as_written == other.base_as_written == "org/tiny@main"
    (tmp_path / "hub" / "models--org--tiny" / "refs" / "main").write_text(OLD)
    assert pin(config, Path("/f"), environ, pins) == pins
    (warning,) = moved(config, Path("/f"), environ, pins)
    assert warning.startswith(f"org/tiny@main means {OLD} now; the fleet keeps {NEW}")
    assert not list(moved(config, Path("/f"), environ, pin(config, Path("/f"), environ, {})))
    assert pin(config, Path("/f"), environ, {})["org/tiny@main"] == OLD
    other_revision = planned(configured(args={"revision": "v1"}), pins)
    assert spec_hash(other_revision.servers[0]) != spec_hash(one)


def test_servers_of_other_machines_and_of_another_hub_are_not_pinned_by_this_cache(
    environ: dict[str, str],
) -> None:
    remote = configured(launcher="ssh", ssh={"hosts": ["a"]})
    assert pin(remote, Path("/f"), environ, {}) == {}
    assert pin(configured(env={"VLLM_USE_MODELSCOPE": "1"}), Path("/f"), environ, {}) == {}


def test_a_path_is_pinned_to_where_its_links_lead_and_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "latest").symlink_to("step-1")
    for written in ("./latest", str(tmp_path / "latest")):
        config = configured(model=written)
        plan = planned(config, pin(config, tmp_path, {}, {}), tmp_path)
        assert (plan.model_path, plan.served_model_name) == (str(tmp_path / "step-1"), "latest")
        assert plan.base == plan.model_path and option(plan, "--revision") is None
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to("step-2")
        assert pin(config, tmp_path, {}, plan.pins) == plan.pins
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to("step-1")


def test_a_model_on_the_hub_is_found_by_its_revision(environ: dict[str, str]) -> None:
    def found(text: str) -> str | None:
        directory = locate(text, environ)
        return None if directory is None else directory.name

    assert [found(f"org/tiny{at}") for at in ("", "@main", "@v1", f"@{OLD}")] == [
        NEW,
        NEW,
        OLD,
        OLD,
    ]
    assert found("org/tiny@absent") is None
    for outside in ("org/tiny@../refs", "org/..", "../org", "org/tiny@", "a/b/c", "org/tiny@/etc"):
        assert found(outside) is None
    with pytest.raises(NotFoundError) as caught:
        absolute("org/absent@v2")
    assert caught.value.hint.endswith("hf download org/absent --revision v2")
