"""The difference between a plan and the running replicas. Pure."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from skyctl.core.plan import FleetPlan, FrontSpec, ServerSpec, is_secret
from skyctl.engines import ENGINES
from skyctl.store.processes import ProcessRow
from skyctl.supervisor.wire import spec_hash

_ORDER = "order of arguments"


@dataclass(frozen=True)
class Changes:
    """What has to be done with replicas, by name in the plan's order, and with fronts."""

    start: tuple[str, ...] = ()
    """Replicas of the plan that do not run."""
    restart: tuple[str, ...] = ()
    """Those that run with other settings."""
    stop: tuple[str, ...] = ()
    """Those that run and are not in the plan."""
    router: bool = False
    """Whether the router changes."""
    tinker: bool = False
    """Whether the Tinker API changes."""
    running_fronts: tuple[str, ...] = ()
    """The fronts that run, changed or not."""

    def __bool__(self) -> bool:
        return bool(self.start or self.restart or self.stop or self.router or self.tinker)

    def __str__(self) -> str:
        by_verb = {"start": self.start, "restart": self.restart, "stop": self.stop}
        parts = [f"{verb} {', '.join(names)}" for verb, names in by_verb.items() if names]
        fronts = [name for name in ("router", "tinker") if getattr(self, name)]
        return "; ".join(parts) or ", ".join(fronts) or "nothing to do"


def compare(
    plan: FleetPlan,
    running: Mapping[str, str | None],
    router: str | None,
    tinker: str | None = None,
) -> Changes:
    """What to do so that what runs becomes `plan`. A process is given by its spec's hash; None: it
    was given up or stopped, or (a front) there is none.
    """
    planned = {spec.name: spec_hash(spec) for spec in plan.servers}
    fronts = {"router": router, "tinker": tinker}
    start, restart = [], []
    for name, digest in planned.items():
        current = running.get(name)
        if current is None:
            start.append(name)
        elif current != digest:
            restart.append(name)
    return Changes(
        start=tuple(start),
        restart=tuple(restart),
        stop=tuple(name for name in running if name not in planned),
        router=router != (spec_hash(plan.router) if plan.router else None),
        tinker=tinker != (spec_hash(plan.tinker) if plan.tinker else None),
        running_fronts=tuple(name for name in fronts if fronts[name] is not None),
    )


class ChangeKind(StrEnum):
    """What `up` does with one process."""

    START = "start"
    RESTART = "restart"
    STOP = "stop"
    KEEP = "keep"


@dataclass(frozen=True)
class Difference:
    """One setting of a process that is to start again; None: it does not have it."""

    setting: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class ProcessChange:
    """What `up` does with one process, and in which settings it differs from the last time."""

    name: str
    kind: ChangeKind
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class Preview:
    """What `up` would do with each process of the plan, and with those that it does not have."""

    processes: tuple[ProcessChange, ...]

    def of_kind(self, *kinds: ChangeKind) -> tuple[ProcessChange, ...]:
        """The processes that this happens to."""
        return tuple(process for process in self.processes if process.kind in kinds)

    @property
    def disturbs(self) -> bool:
        """Whether something that runs ends."""
        return bool(self.of_kind(ChangeKind.RESTART, ChangeKind.STOP))

    @property
    def differs(self) -> bool:
        """Whether something runs, or ran last, with other settings."""
        return self.disturbs or any(process.differences for process in self.processes)

    @property
    def idle(self) -> bool:
        """Whether nothing runs that the plan could be compared with."""
        return not self.of_kind(ChangeKind.RESTART, ChangeKind.STOP, ChangeKind.KEEP)

    def to_json(self) -> list[dict[str, Any]]:
        """One object per process."""
        return [asdict(process) for process in self.processes]


def preview(plan: FleetPlan, changes: Changes, rows: Iterable[ProcessRow]) -> Preview:
    """`changes` process by process. `rows` say with which settings they run."""
    settings = {row.name: row.settings for row in rows}
    fronts = {"router": (changes.router, plan.router), "tinker": (changes.tinker, plan.tinker)}
    processes = [
        _previewed(spec.name, _kind_of(spec.name, changes), spec, settings) for spec in plan.servers
    ]
    processes += [ProcessChange(name, ChangeKind.STOP) for name in changes.stop]
    for name, (changed, front) in fronts.items():
        if changed and front is None:
            processes.append(ProcessChange(name, ChangeKind.STOP))
        elif front is not None:
            moved = ChangeKind.RESTART if name in changes.running_fronts else ChangeKind.START
            kind = moved if changed else ChangeKind.KEEP
            processes.append(_previewed(name, kind, front, settings))
    return Preview(tuple(processes))


def preview_of_rows(plan: FleetPlan, rows: Sequence[ProcessRow]) -> Preview:
    """The preview of a fleet whose supervisor is gone: what is on record and lives is adopted."""
    digests = {row.name: row.spec_hash if row.alive() else None for row in rows}
    router, tinker = digests.pop("router", None), digests.pop("tinker", None)
    servers = {name: digest for name, digest in digests.items() if digest is not None}
    return preview(plan, compare(plan, servers, router, tinker), rows)


def settings_of(spec: ServerSpec | FrontSpec) -> dict[str, str]:
    """What `spec_hash` compares, by name: arguments, variables, machines. The values of variables
    that are named like secrets are replaced by a digest.
    """
    server = spec if isinstance(spec, ServerSpec) else None
    placement = ENGINES[server.engine].variables.placement if server else ()
    argv = server.as_written(server.argv) if server else spec.argv
    settings = _arguments(argv) | _variables(spec.env, placement)
    if server is None or server.node is None:
        return settings
    settings["machine"] = server.node.target
    if (ray := server.node.ray) is not None:
        settings["ray"] = f"{ray.address} {dict(ray.labels)} {ray.resource} {ray.count} {ray.head}"
    for follower in server.followers:
        below = _arguments(server.as_written(follower.argv))
        below |= _variables(follower.env, placement)
        settings |= {f"{follower.node.target}: {name}": value for name, value in below.items()}
    return settings


def _kind_of(name: str, changes: Changes) -> ChangeKind:
    if name in changes.start:
        return ChangeKind.START
    return ChangeKind.RESTART if name in changes.restart else ChangeKind.KEEP


def _previewed(
    name: str,
    kind: ChangeKind,
    spec: ServerSpec | FrontSpec,
    settings: Mapping[str, Mapping[str, str]],
) -> ProcessChange:
    before = settings.get(name)
    if kind is ChangeKind.KEEP or not before:
        return ProcessChange(name, kind)
    after = settings_of(spec)
    names = [*before, *(setting for setting in after if setting not in before)]
    differences = [
        Difference(setting, before.get(setting), after.get(setting))
        for setting in names
        if before.get(setting) != after.get(setting)
    ]
    if kind is ChangeKind.RESTART and not differences:
        differences = [Difference(_ORDER, None, None)]
    return ProcessChange(name, kind, tuple(differences))


def _arguments(argv: Sequence[str]) -> dict[str, str]:
    """`--name value` by name; the words before the first are the command. A flag is `set`."""
    settings: dict[str, list[str]] = {"command": []}
    name = "command"
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            settings.setdefault(name, []).extend([value] if equals else [])
        else:
            settings[name].append(word)
    return {name: shlex.join(words) if words else "set" for name, words in settings.items()}


def _variables(env: Mapping[str, str], placement: Sequence[str]) -> dict[str, str]:
    """Environment variables, but for those that say where a process was placed."""
    return {
        name: f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:12]}"
        if is_secret(name)
        else value
        for name, value in sorted(env.items())
        if name not in placement
    }
