"""Assigns replicas to machines, GPUs or CPU cores, and one replica to several machines. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from skyctl.engines.base import Engine
from skyctl.engines.launches import Parallelism, ServerLaunch, ServerPlacement, Span
from skyctl.fleetfile.arguments import merge_arguments
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.sections import ReplicaGroup
from skyctl.launch.base import Cpu, Follower, Machine


@dataclass(frozen=True)
class Replica:
    """One replica, with its group's settings laid over the fleet's."""

    name: str
    """`<group or fleet>-<number>`."""
    args: dict[str, Any]
    """Arguments of its server, by normalised names."""
    env: dict[str, str]
    """Variables that are added to its environment."""
    gpus: tuple[int, ...] | None
    """What the file asks for; None where it leaves them to skyctl."""
    port: int | None
    """What the file asks for; None where it leaves it to skyctl."""
    parallelism: Parallelism
    """Its workers."""
    role: str = ""
    """prefill or decode; "" for a server that does both."""
    nodes: int = 1
    """On how many machines it runs."""

    @property
    def part(self) -> Replica:
        """As much of it as one machine runs: whole pipeline stages."""
        stages = self.parallelism.pipeline // self.nodes
        return replace(self, parallelism=replace(self.parallelism, pipeline=stages), nodes=1)


def expand_replicas(config: FleetConfig) -> list[Replica]:
    """Every replica of a fleet that skyctl starts, in order.

    Names are `<group or fleet name>-<number>`; groups of one name are numbered on.
    """
    numbers: Counter[str] = Counter()
    replicas: list[Replica] = []
    for group in config.groups:
        prefix = group.name or "-".join(filter(None, (config.name, group.role)))
        for index in range(group.count):
            name = f"{prefix}-{numbers[prefix]}"
            numbers[prefix] += 1
            replicas.append(_replica(config, group, index, name, len(replicas)))
    return replicas


def _replica(
    config: FleetConfig, group: ReplicaGroup, index: int, name: str, position: int
) -> Replica:
    """`index` counts within the group, `position` within the fleet."""
    port = group.ports[index] if group.ports is not None else None
    if port is None and config.ports is not None and position < len(config.ports):
        port = config.ports[position]
    return Replica(
        name=name,
        args=merge_arguments(config.args, group.args),
        env={**config.env, **group.env},
        gpus=tuple(group.gpus[index]) if group.gpus is not None else None,
        port=port,
        parallelism=Parallelism(
            tensor=group.tensor_parallel_size or config.tensor_parallel_size,
            pipeline=group.pipeline_parallel_size or config.pipeline_parallel_size,
            data=group.data_parallel_size or config.data_parallel_size,
        ),
        role=group.role or "",
        nodes=group.nodes_per_replica or config.nodes_per_replica,
    )


@dataclass(frozen=True)
class Place:
    """Where one replica runs: its machine, the GPUs there (() on CPU), and the cores of each of its
    workers there (() leaves them to the engine). `others` are its other machines, if it has any."""

    machine: Machine
    gpus: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    others: tuple[Place, ...] = ()


def place_replicas(
    replicas: Sequence[Replica],
    machines: Sequence[Machine],
    *,
    allowed: Sequence[int] | None,
    on_gpus: bool,
    share: bool,
) -> list[Place]:
    """A place for each replica. `allowed` are the GPU indices that may be used; None: all of them.

    Of the machines with room the one with the fewest replicas takes the next, so that a fleet that
    grows moves none; a replica that needs several takes as many, which differ. Where none has room,
    `check_plan` reports it. A cluster has its own rule, and chooses later: it is told what each
    replica needs.
    """
    cluster = machines[0].node
    if cluster is not None and cluster.ray is not None:
        need = replace(cluster.ray, resource="GPU" if on_gpus else "CPU")
        nodes = [
            replace(cluster, ray=replace(need, count=r.parallelism.world_size)) for r in replicas
        ]
        return [Place(replace(machines[0], node=node), (), ()) for node in nodes]
    gpus = [
        (list(allowed) if allowed is not None else [gpu.index for gpu in machine.gpus])
        if on_gpus
        else []
        for machine in machines
    ]
    homes: list[list[int]] = [[] for _ in machines]
    parts = [replica.part for replica in replicas]
    for number, part in enumerate(parts):

        def fits(index: int, size: int = part.parallelism.world_size) -> bool:
            taken = 0 if share else sum(parts[n].parallelism.world_size for n in homes[index])
            return not on_gpus or len(gpus[index]) - taken >= size

        ranked = sorted(range(len(machines)), key=lambda i: (not fits(i), len(homes[i])))
        for index in ranked[: replicas[number].nodes]:
            homes[index].append(number)
    places: dict[int, Place] = {}
    for machine, numbers, free in zip(machines, homes, gpus, strict=True):
        hosted = [parts[number] for number in numbers]
        placed = place_on_gpus(hosted, free, share=share) if on_gpus else [()] * len(hosted)
        bound = bind_to_cores([replica.parallelism.world_size for replica in hosted], machine.cpus)
        for number, chosen, cores in zip(numbers, placed, bound, strict=True):
            place = Place(machine, chosen, cores)
            first = places.setdefault(number, place)
            if first is not place:
                places[number] = replace(first, others=(*first.others, place))
    return [places[number] for number in range(len(replicas))]


def place_on_gpus(
    replicas: Sequence[Replica], allowed: Sequence[int], *, share: bool
) -> list[tuple[int, ...]]:
    """GPU indices per replica: what the file says, else one GPU per worker from `allowed`.

    Without `share` each GPU goes to one replica; with it the least used GPUs are taken, so replicas
    spread before they stack. Where GPUs run out a replica gets fewer than it has workers:
    `check_plan` reports that.
    """
    used: Counter[int] = Counter(gpu for replica in replicas for gpu in replica.gpus or ())
    placed: list[tuple[int, ...]] = []
    for replica in replicas:
        if replica.gpus is not None:
            placed.append(replica.gpus)
            continue
        candidates = [gpu for gpu in allowed if share or not used[gpu]]
        candidates.sort(key=lambda gpu: used[gpu])  # stable: equals stay in the order of `allowed`
        chosen = tuple(sorted(candidates[: replica.parallelism.world_size]))
        used.update(chosen)
        placed.append(chosen)
    return placed


def bind_to_cores(
    world_sizes: Sequence[int], cpus: Sequence[Cpu]
) -> list[tuple[tuple[int, ...], ...]]:
    """CPU cores of each worker of each replica; () leaves the choice to the engine.

    vLLM's own choice ("auto") looks only at its own process: on two cores two replicas both bind
    their OpenMP threads to core 0. With "nobind" each starts a thread per core, and threads that
    spin-wait for one another on shared cores are slow. So where more than one worker runs, each
    gets its own cores, and all the same number of them: a sum split over another number of threads
    rounds differently, and replicas of one fleet should give the same tokens. Of more than two
    cores a worker leaves one to its scheduler process, as "auto" does. With fewer cores than
    workers, workers share cores in turn.
    """
    workers = sum(world_sizes)
    if workers <= 1 or not cpus:
        return [()] * len(world_sizes)
    first_of_core: dict[int, int] = {}
    for cpu in cpus:
        first_of_core.setdefault(cpu.core, cpu.id)
    pool = sorted(first_of_core.values())
    if len(pool) < workers:
        pool = [cpu.id for cpu in cpus]
    share = max(1, len(pool) // workers)
    threads = share - 1 if share > 2 else share
    ranks = []
    for worker in range(workers):
        start = worker * share % len(pool)
        ranks.append(tuple(pool[start : start + threads]))
    ends = list(accumulate(world_sizes, initial=0))
    return [tuple(ranks[first:end]) for first, end in pairwise(ends)]


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
        assert node is not None and leader.placement.span is not None
        span = replace(
            leader.placement.span,
            rank=rank,
            own_address=node.address,
            interface=other.machine.interface,
        )
        placement = ServerPlacement(leader.placement.device, other.gpus, other.cores, span)
        part = replace(leader, python=node.python, placement=placement)
        command = engine.server_command(part)
        yield Follower(node, command.argv, command.env, other.gpus)
