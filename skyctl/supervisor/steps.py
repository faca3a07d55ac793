"""The order in which a fleet becomes what a plan says: what is missing first, then replicas in the
place of others, a few at a time. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skyctl.core.plan import ServerSpec
from skyctl.supervisor.reconcile import Changes


@dataclass(frozen=True)
class Step:
    """Replicas to start, once those to `stop` have ended; a restarted one is in both."""

    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


@dataclass(frozen=True)
class Order:
    """`first` are started beside all that runs, `steps` taken one after the other; `last` are
    removed at the end.
    """

    first: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    last: tuple[str, ...] = ()


@dataclass
class _Places:
    """What servers that end hold and servers that start need: ports, and GPUs unless shared."""

    running: Mapping[str, ServerSpec]
    planned: Mapping[str, ServerSpec]
    share_gpus: bool
    ended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._holders: dict[tuple[str, str, int], list[str]] = {}
        for name, spec in self.running.items():
            for claim in self._claims(spec):
                self._holders.setdefault(claim, []).append(name)

    def blockers(self, name: str) -> set[str]:
        """The other servers that must end before this server can start."""
        needs = self._claims(self.planned[name]) if name in self.planned else set()
        holders = {holder for claim in needs for holder in self._holders.get(claim, ())}
        return holders - self.ended - {name}

    def together(self, name: str) -> tuple[str, ...]:
        """This server and all that must end with it."""
        group = [name]
        for member in group:
            group += sorted(self.blockers(member) - set(group))
        return tuple(group)

    def _claims(self, spec: ServerSpec) -> set[tuple[str, str, int]]:
        target = spec.node.target if spec.node else ""
        claims = {(target, "port", port) for port in (spec.port, spec.master_port) if port}
        if not self.share_gpus:
            places = [(target, spec.gpus), *((f.node.target, f.gpus) for f in spec.followers)]
            claims |= {(machine, "gpu", gpu) for machine, gpus in places for gpu in gpus}
        return claims


def order_of(
    changes: Changes,
    running: Mapping[str, ServerSpec],
    planned: Mapping[str, ServerSpec],
    *,
    serving: Iterable[str] = (),
    parallel: int = 1,
    share_gpus: bool = False,
) -> Order:
    """How to carry out `changes`. `running` are the specs of the servers that end, `planned` those
    of the servers that start. Those that are not `serving` come first: nobody misses them.
    """
    ending = {name: running[name] for name in (*changes.restart, *changes.stop)}
    places = _Places(ending, planned, share_gpus)
    first = tuple(name for name in changes.start if not places.blockers(name))
    busy = set(serving)
    pending = sorted(changes.restart, key=lambda name: name in busy)
    pending += [name for name in changes.start if name not in first]
    steps = []
    while pending:
        groups = (places.together(name) for name in pending)
        alone = next((group for group in groups if len(group) == 1), None)
        group = alone or min((places.together(name) for name in pending), key=len)
        stop = tuple(name for name in group if name in ending and name not in places.ended)
        steps.append(Step(stop, tuple(name for name in group if name in pending)))
        places.ended.update(stop)
        pending = [name for name in pending if name not in group]
    last = tuple(name for name in changes.stop if name not in places.ended)
    return Order(first, tuple(_joined(steps, max(1, parallel))), last)


def _joined(steps: Sequence[Step], parallel: int) -> Iterable[Step]:
    """Steps of up to `parallel` starts each."""
    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    for step in steps:
        if start and len(start) + len(step.start) > parallel:
            yield Step(stop, start)
            stop, start = (), ()
        stop, start = (*stop, *step.stop), (*start, *step.start)
    if start:
        yield Step(stop, start)
