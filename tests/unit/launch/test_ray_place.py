"""What a node was reserved for may end before it has one; what Ray does is made up."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.errors import SkyctlError
from skyctl.launch.base import RayCluster
from skyctl.launch.ray import cluster as cluster_module
from skyctl.launch.ray import driver

ADDRESS = "10.0.0.7"
NODE = {
    "NodeID": "n",
    "NodeManagerAddress": ADDRESS,
    "Alive": True,
    "Resources": {"GPU": 1.0},
    "Labels": {},
}
GROUP = "skyctl-t"


class Ray:
    """A cluster of one node with one GPU. Each of its `moments` comes once: what `during` has for
    it happens then, and what Ray would answer is wrong by then, if that returns True."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.created = 0
        self.during: dict[str, Callable[[], object]] = {}

    def _comes(self, moment: str) -> bool:
        return bool(self.during.pop(moment, lambda: False)())

    def nodes(self) -> list[dict[str, Any]]:
        return [NODE]

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        busy = self.groups or self._comes("looking")
        return {"n": {"GPU": 0.0 if busy else 1.0}}

    def placement_group(self, _: object, name: str, **__: object) -> SimpleNamespace:
        self.groups.add(name)
        self.created += 1
        return SimpleNamespace(name=name, wait=lambda _: not self._comes("reserving"))

    def get_placement_group(self, name: str) -> SimpleNamespace:
        if name not in self.groups:
            raise ValueError(name)
        return SimpleNamespace(name=name)

    def remove_placement_group(self, group: SimpleNamespace) -> None:
        self.groups.discard(group.name)

    def placement_group_table(self) -> dict[str, Any]:
        return {}

    def get(self, reference: object, timeout: float) -> object:
        self._comes("asking the node")
        return reference


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_: None)
    modules = {
        "ray": ray,
        "ray.util.placement_group": ray,
        "ray._private.state": ray,
        "ray.util.scheduling_strategies": strategies,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cluster_module, "_LOOK_S", 0.0)
    return ray


class Tether:
    """It has a place chosen, over its client. Each may end."""

    def __init__(self, ray: Ray, stack: ExitStack) -> None:
        theirs, self._channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, request = os.pipe()
        self._answers, stdout = os.pipe()
        for descriptor in (stdin, stdout):
            stack.callback(os.close, descriptor)
        stack.callback(theirs.close)
        stack.callback(self.end)
        asking = {"do": "place", "token": "t", "turn": 0, "patience_s": 60.0}
        for message in (asking, {"do": "relay", "target": ADDRESS}):
            os.write(request, json.dumps(message).encode() + b"\n")
        os.close(request)
        wanted = RayCluster("", resource="GPU")
        self._client = driver._Client(theirs, (stdin, stdout, stdout), wanted, "", [])
        worker = SimpleNamespace(place=SimpleNamespace(remote=lambda _: (4000, "0")))
        workers: Any = SimpleNamespace(
            on=lambda _: worker, new=lambda **_: worker, end=lambda _: None
        )
        self._cluster = driver.Cluster(wanted, [], workers)

    def end(self) -> None:
        """Its client, which the driver has noticed, and itself."""
        self._channel.close()
        driver._watch(self._client)
        self.end_itself()

    def end_itself(self) -> None:
        if self._answers >= 0:
            os.close(self._answers)
        self._answers = -1

    def answer(self) -> str:
        """Where the driver goes on."""
        return driver._answer(self._client, self._cluster)

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in os.read(self._answers, 4096).splitlines()]


@pytest.fixture
def tether(ray: Ray) -> Iterator[Tether]:
    with ExitStack() as stack:
        yield Tether(ray, stack)


def test_who_waits_for_a_place_gets_it(ray: Ray, tether: Tether) -> None:
    ray.during["looking"] = lambda: True  # there is none at first
    assert tether.answer() == ADDRESS
    place = {"target": ADDRESS, "address": ADDRESS, "port": 4000, "gpus": [0]}
    assert tether.messages()[1:] == [place]
    assert ray.groups == {GROUP}


@pytest.mark.parametrize("moment", ["looking", "reserving", "asking the node"])
@pytest.mark.parametrize("whole", [True, False], ids=["with its client", "itself"])
def test_nothing_stays_reserved_for_who_has_ended(
    ray: Ray, tether: Tether, moment: str, whole: bool
) -> None:
    ray.during[moment] = tether.end if whole else tether.end_itself
    with suppress(BrokenPipeError, SkyctlError):
        tether.answer()
    assert not ray.during and ray.groups == set()


@pytest.mark.parametrize(("moment", "created"), [("looking", 0), ("reserving", 1)])
def test_nothing_more_is_reserved_for_who_has_ended(
    ray: Ray, tether: Tether, moment: str, created: int
) -> None:
    def stop() -> bool:
        tether.end()
        ray.groups.clear()
        return True

    ray.during[moment] = stop
    with suppress(BrokenPipeError, SkyctlError):
        tether.answer()
    assert (ray.created, ray.groups) == (created, set())


def test_nothing_stays_reserved_if_ray_fails_meanwhile(ray: Ray, tether: Tether) -> None:
    def fail() -> None:
        raise RuntimeError

    ray.during["reserving"] = fail
    with pytest.raises(RuntimeError):
        tether.answer()
    assert ray.groups == set()
