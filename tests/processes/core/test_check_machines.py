"""What a plan needs of other machines is asked there; each lack is a sentence."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl import __version__
from skyctl.core.check import check_plan
from skyctl.core.check_machines import check_machines, refuse_unseen
from skyctl.core.plan import FleetPlan
from skyctl.core.planner import plan_fleet
from skyctl.errors import PreflightError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.base import Gpu, Machine, Node
from skyctl.launch.remote.session import PROTOCOL
from skyctl.push.request import PushRequest
from skyctl.store.paths import FleetPaths
from tests.unit.push.checkpoints import write_checkpoint

HELLO = json.dumps({"agent": PROTOCOL, "skyctl": __version__})
WELL = {"missing": [], "absent": [], "taken": {}, "gpus": [{"index": 0}, {"index": 1}]}


def plan(
    base_dir: Path,
    *,
    tensor_parallel_size: int = 1,
    transport: str = "auto",
    **answers: dict[str, Any] | str,
) -> FleetPlan:
    """Of a replica on each machine, which answers so; a text is what ssh fails with."""
    machines: list[Machine] = []
    for name, answer in answers.items():
        script = (
            f"echo '{answer}' >&2; exit 255"
            if isinstance(answer, str)
            # $asked: the last path of the question
            else f"echo '{HELLO}'; read asked; asked=${{asked%'\"]'*}}; asked=${{asked##*'\"'}}; "
            f"echo '{json.dumps({**WELL, **answer})}' | sed \"s|[$]asked|$asked|\"; cat"
        )
        node = Node(name, "10.0.0.7", "/opt/python", ("sh", "-c", script, "ssh"), 60.0)
        gpus = tuple(Gpu(index, f"GPU-{index}", "H100", 0) for index in range(2))
        machines.append(Machine(node, gpus, (), lambda: 0))
    config = FleetConfig.model_validate(
        {
            "name": "f",
            "model": "org/model",
            "launcher": "ssh",
            "ssh": {"hosts": list(answers)},
            "replicas": len(answers),
            "tensor_parallel_size": tensor_parallel_size,
            "weight_transfer": {"transport": transport},
            "ports": [20001 + number for number in range(len(answers))],
        }
    )
    ports = itertools.count(30000)
    return plan_fleet(
        config, base_dir, gpus=[], next_port=lambda: next(ports), environ={}, machines=machines
    )


def test_a_machine_that_has_all_is_no_problem(tmp_path: Path) -> None:
    planned = plan(tmp_path, a={}, b={})
    assert [(spec.host, spec.gpus, spec.backend) for spec in planned.servers] == [
        ("10.0.0.7", (0,), "")
    ] * 2
    assert planned.servers[0].argv[0] == "/opt/python"
    assert list(check_machines(planned, ())) == []


def test_a_sender_on_each_machine_is_asked_for(tmp_path: Path) -> None:
    planned = plan(tmp_path, transport="ipc", a={}, b={})
    assert [spec.backend for spec in planned.servers] == ["ipc", "ipc"]
    assert any("with the ipc backend run code" in one for one in planned.warnings)


def test_machines_have_one_version(tmp_path: Path) -> None:
    versions = [{"versions": {"engine": version}} for version in ("0.31.0", "0.32.0")]
    found = check_machines(plan(tmp_path, a=versions[0], b=versions[1]), ())
    assert list(found) == [
        ("machines have different versions of engine: a 0.31.0, b 0.32.0", "install one version")
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"missing": ["engine"]}, "b: /opt/python has no engine"),
        ({"absent": ["/models/m"]}, "b has no /models/m"),
        ({"taken": {"20002": "pid 7 (x)"}}, "b: port 20002 is taken by pid 7 (x)"),
        ({"gpus": []}, "b has no GPU 0"),
        ("no route", "b cannot be asked over ssh: no route"),
    ],
)
def test_each_lack_names_its_machine(
    tmp_path: Path, answer: dict[str, Any] | str, message: str
) -> None:
    assert [found for found, _ in check_machines(plan(tmp_path, a={}, b=answer), ())] == [message]


def test_a_shared_directory_that_a_machine_does_not_share_is_named(tmp_path: Path) -> None:
    told = plan(tmp_path, a={}, b={})
    assert list(check_machines(shared(told, str(tmp_path)), ())) == []
    assert list(tmp_path.iterdir()) == [], "what is written to ask is removed"
    blind = plan(tmp_path, a={}, b={"absent": ["$asked"]})
    ((problem, _),) = check_machines(shared(blind, str(tmp_path)), ())
    assert problem == f"b cannot read what is written to shared_dir {tmp_path} here"
    ((problem, _),) = check_machines(shared(told, "/proc/no"), ())
    assert problem == "shared_dir /proc/no cannot be written here: No such file or directory"


def shared(planned: FleetPlan, directory: str) -> FleetPlan:
    config = planned.config.model_copy(update={"shared_dir": directory})
    return replace(planned, config=config)


def test_a_push_of_what_a_machine_does_not_see_is_refused(tmp_path: Path) -> None:
    paths = FleetPaths(tmp_path / "state", "f")
    blind = plan(tmp_path, a={}, b={"absent": ["it"]})
    asked = PushRequest(str(tmp_path))
    staged = write_checkpoint(paths.staging / "1" / "live")
    with pytest.raises(PreflightError, match=f"^b has no {tmp_path}$"):
        refuse_unseen(blind, asked, paths)
    with pytest.raises(PreflightError, match=f"^b has no {paths.directory}$") as caught:
        refuse_unseen(blind, replace(asked, keep=True), paths)
    assert "push without --keep" in caught.value.hint
    with pytest.raises(PreflightError) as caught:
        refuse_unseen(blind, PushRequest(str(staged)), paths)
    assert caught.value.hint == "weights from memory need a `shared_dir` in the fleet file"
    refuse_unseen(plan(tmp_path, a={}, b={}), asked, paths)
    refuse_unseen(blind, PushRequest(str(tmp_path / "nothing")), paths)  # the push says so


def test_a_replica_that_fits_no_machine_says_how_many_gpus_it_lacks(tmp_path: Path) -> None:
    found = check_plan(plan(tmp_path, tensor_parallel_size=3, a={}, b={}))
    told = {problem.message for problem in found}
    assert "f-0: not enough GPUs: it needs 3, and 2 of them can be had" in told
