"""What the models of a fleet mean when it comes up: commits for branches of the hub, directories
for links. Kept until the fleet goes down: a server that restarts gets what its siblings have. So is
`device: auto` once it has meant cuda.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyctl.checkpoints.hub import MAIN, HubReference
from skyctl.core.placement import expand_replicas
from skyctl.engines import ENGINES
from skyctl.engines.base import Engine
from skyctl.fleetfile.arguments import PlanWarning
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.values import resolve_relative
from skyctl.store.paths import expanded

Pins = Mapping[str, str]
"""By reference: `ORG/NAME@REVISION` to a commit, an absolute path to one without links."""
DEVICE = "device"
"""The pin of a fleet whose `device: auto` is cuda, which an nvidia-smi that fails does not change:
its servers would be started again on CPU."""


def model_of(config: FleetConfig, base_dir: Path) -> str:
    """The fleet's model: a hub id, or an absolute path as the file has it, links kept."""
    assert config.model is not None  # the schema asks for it where servers are started
    resolved = resolve_relative(config.model, base_dir)
    if not Path(resolved).is_absolute():
        return resolved
    return os.path.abspath(base_dir / expanded(config.model))  # noqa: PTH100 - links are kept


def pin(
    config: FleetConfig, base_dir: Path, environ: Mapping[str, str], earlier: Pins
) -> dict[str, str]:
    """What each model of the fleet means: by `known` if it is there, else on this machine now.
    Models that are not in the local cache are left out: their servers download them.
    """
    model, engine = model_of(config, base_dir), ENGINES[config.engine]
    pins = {DEVICE: earlier[DEVICE]} if DEVICE in earlier else dict[str, str]()
    if Path(model).is_absolute():
        pins[model] = earlier.get(model) or os.path.realpath(model)
    if config.launcher != "local":
        return pins  # servers of other machines have caches of their own
    for replica in expand_replicas(config):
        inherited = {**environ, **replica.env}
        if inherited.get(engine.hub.other_hub_variable, "").lower() in ("1", "true"):
            continue
        for reference in references(engine, model, replica.args):
            key = str(reference)
            if key not in pins and (commit := earlier.get(key) or reference.commit(inherited)):
                pins[key] = commit
    return pins


def moved(
    config: FleetConfig, base_dir: Path, environ: Mapping[str, str], pins: Pins
) -> Iterator[PlanWarning]:
    """Names that mean something else by now than what the fleet keeps."""
    for name, meaning in pin(config, base_dir, environ, {}).items():
        if pins.get(name, meaning) != meaning:
            yield PlanWarning(
                f"{name} means {meaning} now; the fleet keeps {pins[name]} until it goes down",
                "skyctl down && skyctl up; or name what it is to serve in the fleet file",
            )


def references(engine: Engine, model: str, args: Mapping[str, Any]) -> Iterator[HubReference]:
    """The models on the hub that a server loads."""
    yield from _revisions(engine, model, args).values()


def with_revisions(
    engine: Engine, model: str, args: Mapping[str, Any], pins: Pins
) -> dict[str, Any]:
    """The arguments of a server with a revision for each model on the hub: the commit, where it is
    known.
    """
    pinned = dict(args)
    for argument, reference in _revisions(engine, model, args).items():
        _put(pinned, argument, pins.get(str(reference), reference.revision))
    added = {name: value for name, value in pinned.items() if name not in args}
    return {**added, **{name: pinned[name] for name in args}}


def _revisions(engine: Engine, model: str, args: Mapping[str, Any]) -> dict[str, HubReference]:
    """The models on the hub that a server loads, by the argument that has their revision."""
    own, hub = _hub(model), engine.hub
    if own and any(_hub(_get(args, name)) not in (None, own) for name in hub.shared_revision):
        return {}  # a commit means nothing in another repository
    by_argument: dict[str, HubReference] = {}
    for named, revision in hub.revisions.items():
        named_model = _hub(model if named == "model" else _get(args, named))
        if named_model is None:
            continue
        fallback = _get(args, hub.revisions["model"]) if named in hub.follows_model else None
        requested = _get(args, revision) or fallback or MAIN
        if (reference := HubReference.parse(f"{named_model}@{requested}")) is not None:
            by_argument[revision] = reference
    return by_argument


def _hub(value: Any) -> str | None:
    """The value if it names a model on the hub."""
    if not isinstance(value, str) or os.path.exists(value):  # noqa: PTH110
        return None
    reference = HubReference.parse(value)
    return value if reference is not None and value == reference.model else None


def _get(args: Mapping[str, Any], name: str) -> Any:
    """An argument, or a field of one (`speculative-config.model`), however it is written."""
    head, _, key = name.partition(".")
    if name in args or not key:
        return args.get(name)
    return _fields(args.get(head)).get(key)


def _put(args: dict[str, Any], name: str, value: str) -> None:
    head, _, key = name.partition(".")
    if key and name not in args and head in args:
        args[head] = {**_fields(args[head]), key: value}
    else:
        args[name] = value


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return dict(value) if isinstance(value, dict) else {}
