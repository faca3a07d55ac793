"""A replica that runs on several machines: what is started on those beside its first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from skyctl.core.placement import Place
from skyctl.engines.base import Engine, ServerLaunch, Span
from skyctl.launch.base import Follower


def master_of(name: str) -> str:
    """What a fleet's ports call the one at which the parts of a replica meet."""
    return f"{name}-master"


def leading(place: Place, port: int) -> Span:
    """What the part on a replica's first machine is told; all meet there, at `port`."""
    node = place.machine.node
    assert node is not None  # the schema asks for machines
    nodes = 1 + len(place.others)
    return Span(nodes, 0, node.address, port, node.address, place.machine.interface)


def followers(engine: Engine, leader: ServerLaunch, place: Place) -> Iterator[Follower]:
    """The other parts of a replica, in the order of their ranks."""
    for rank, other in enumerate(place.others, start=1):
        node = other.machine.node
        assert node is not None and leader.span is not None
        span = replace(
            leader.span, rank=rank, own_address=node.address, interface=other.machine.interface
        )
        part = replace(leader, python=node.python, gpus=other.gpus, cores=other.cores, span=span)
        command = engine.server_command(part)
        yield Follower(node, command.argv, command.env, other.gpus)
