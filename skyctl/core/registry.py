"""Which fleet a command is about: from --fleet, a fleet file, this directory, or the only one."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import urlsplit

from skyctl.errors import ConflictError, FleetFileError, NotFoundError, SkyctlError, UsageError
from skyctl.store.paths import (
    FleetPaths,
    expanded,
    fleet_paths,
    flocked,
    place_private_file,
    state_root,
)

if TYPE_CHECKING:
    from skyctl.fleetfile.schema import FleetConfig
    from skyctl.fleetfile.yaml_source import YamlSource

DEFAULT_FILE = "fleet.yaml"
Files = Sequence[Path] | None
"""Fleet files as `--file` names them; later ones override."""


@dataclass(frozen=True)
class FleetRef:
    """The fleet a command is about."""

    name: str
    """Its name."""
    paths: FleetPaths
    """Where its files are."""
    loaded: FleetConfig | None
    """The content of its file; None if it is up from the unchanged file: commands that need more
    than the name read it then, because that takes longer than most verbs.
    """
    base_dir: Path
    """What the file's relative paths are relative to."""
    files: tuple[Path, ...] = ()
    """The user's files, of which later ones override; none if only skyctl's copy exists."""
    source: YamlSource | None = field(default=None, compare=False, repr=False)
    """The text of these files; None without them, and where it is the one on record."""

    @property
    def file(self) -> Path | None:
        """The user's file, or the first of several."""
        return self.files[0] if self.files else None

    @cached_property
    def config(self) -> FleetConfig:
        """Its configuration. Raises FleetFileError."""
        if self.loaded is not None:
            return self.loaded
        from skyctl.fleetfile.load import load_fleet

        # the user's file may have changed by now
        return load_fleet(self.paths.fleet_file, base_dir=self.base_dir).config

    @property
    def attached(self) -> bool:
        """Whether its servers are not started and stopped by skyctl: it has no supervisor."""
        return self.loaded is not None and self.loaded.attached


@dataclass(frozen=True)
class RemoteRef:
    """A fleet of another machine, by the URL at which its supervisor listens.

    `token_file` and `ca` are copies of that fleet's files; without `ca` the system's CAs are
    trusted.
    """

    url: str
    token_file: Path | None = None
    ca: Path | None = None

    @property
    def name(self) -> str:
        return self.url


TOKEN_FILE_VARIABLE, CA_VARIABLE = "SKYCTL_TOKEN_FILE", "SKYCTL_CA"
"""Files for a RemoteRef, as --token-file and --ca."""
_URL_HINT = "as in https://gpu7:7420"


def find(files: Files, name: str | None) -> FleetRef | RemoteRef:
    """Like `select`, but `name` may also be the URL of a fleet on another machine.

    Raises:
        As `select`. UsageError: the URL is invalid.
    """
    return elsewhere(name) if is_url(name) else select(files, name)


def is_url(name: str | None) -> TypeGuard[str]:
    """Whether this is the URL of a fleet on another machine, and not the name of one here."""
    return name is not None and "://" in name


def elsewhere(url: str) -> RemoteRef:
    """The fleet whose supervisor listens at this URL. Raises UsageError: the URL is invalid."""
    from skyctl.fleetfile.values import is_loopback

    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"--fleet {url} is not a URL: {error}", hint=_URL_HINT) from error
    if "@" in parts.netloc:
        raise UsageError(
            "--fleet takes no user or password", hint="give the token in a file: --token-file"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise UsageError(f"--fleet {url} is not the URL of a supervisor", hint=_URL_HINT)
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise UsageError(
            f"--fleet {url}: the token would cross the network unencrypted",
            hint=f"use https://{parts.netloc}, or a tunnel to 127.0.0.1",
        )
    copies = (os.environ.get(variable) for variable in (TOKEN_FILE_VARIABLE, CA_VARIABLE))
    token, ca = (expanded(path) if path else None for path in copies)
    return RemoteRef(url.rstrip("/"), token, ca)


def known_fleets() -> list[str]:
    """Names of the fleets this user has ever started or attached to, sorted. A fleet whose first
    `up` was refused has a directory, but is not remembered.
    """
    fleets = state_root() / "fleets"
    if not fleets.is_dir():
        return []
    return sorted(d.name for d in fleets.iterdir() if fleet_paths(d.name).fleet_file.exists())


def supervisor_running(paths: FleetPaths) -> bool:
    """Whether a live supervisor holds the fleet's lock file."""
    return flocked(paths.supervisor_lock)


def select(files: Files, name: str | None) -> FleetRef:
    """The fleet meant by `--file` and `--fleet`, with its configuration.

    `--fleet` wins, then `--file` (of several, later ones override), then ./fleet.yaml, then the
    only running (or only known) fleet.

    Raises:
        NotFoundError: no fleet file here and no such fleet.
        UsageError: several fleets could be meant; the hint lists them.
        FleetFileError: the fleet file is wrong.
    """
    if is_url(name):
        raise UsageError(
            f"this command works on the fleet's own machine, and not on {name}",
            hint="log in there; what works from here is in docs/how-to/remote.md",
        )
    chosen = _choose(files, name)
    return _from_name(chosen) if isinstance(chosen, str) else _from_files(chosen)


def select_paths(files: Files, name: str | None) -> FleetPaths:
    """Like `select`, for commands that must work when the fleet file no longer loads."""
    chosen = _choose(files, name)
    return fleet_paths(chosen) if isinstance(chosen, str) else _from_files(chosen).paths


def remember(ref: FleetRef) -> None:
    """Keep a copy of the fleet file and of its origin, so the name finds the fleet.

    Raises:
        StateUnwritable: they cannot be written; the fleet is found by its file as before.
    """
    ref.paths.prepare()
    kind = "attached" if ref.attached else "supervised"
    base_dir = str(ref.base_dir.resolve())  # links on the way to it may move while the fleet is up
    origin = origin_of(ref.paths) | {"base_dir": base_dir, "kind": kind}
    if ref.source is not None:
        if ref.file is None or ref.file.parent != ref.paths.directory:  # not one that was kept
            files = [str(file) for file in ref.files]
            origin |= {"file": "".join(files[:1]), "overrides": files[1:]}
        _copy(ref.source.text.encode(), ref.paths.fleet_file)
    _copy(json.dumps(origin).encode(), ref.paths.origin)


def keep_applied(paths: FleetPaths, text: bytes) -> None:
    """This fleet file is applied. The one before it is kept for `rollout undo`."""
    if paths.applied_file.exists() and (before := paths.applied_file.read_bytes()) != text:
        _copy(before, paths.previous_file)
    _copy(text, paths.applied_file)


def restore_applied(paths: FleetPaths) -> None:
    """The fleet file was not applied: the last that was is the fleet's again."""
    if paths.applied_file.exists():
        _copy(paths.applied_file.read_bytes(), paths.fleet_file)


def kept_files(ref: FleetRef) -> list[FleetRef]:
    """The fleet as the last applied file has it, and as the one before it does.

    Raises:
        FleetFileError: one does not load any more (`${VAR}` that is not set).
    """
    from skyctl.fleetfile.load import load_fleet

    paths, base_dir = ref.paths, base_dir_of(ref)
    kept = (file for file in (paths.applied_file, paths.previous_file) if file.exists())
    return [
        FleetRef(ref.name, paths, loaded.config, base_dir, (loaded.path,), loaded.source)
        for loaded in (load_fleet(file, base_dir=base_dir) for file in kept)
    ]


def base_dir_of(ref: FleetRef) -> Path:
    """What relative paths of the fleet file were relative to when the fleet came up."""
    return Path(origin_of(ref.paths).get("base_dir") or ref.base_dir)


def origin_of(paths: FleetPaths) -> dict[str, Any]:
    """`file`, `overrides`, `base_dir` and `kind` of a remembered fleet; {} for another."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(paths.origin.read_bytes()))
    return {}


def _copy(text: bytes, path: Path) -> None:
    if not path.exists() or path.read_bytes() != text:
        place_private_file(path, text, replace=True)


def was_attached(paths: FleetPaths) -> bool:
    """Whether the fleet is remembered as one whose servers skyctl did not start."""
    return origin_of(paths).get("kind") == "attached"


def left_alone(paths: FleetPaths) -> bool:
    """Whether processes of this fleet, on record or not, run on without a supervisor, and are not
    being ended.
    """
    if not paths.database.exists() or supervisor_running(paths):
        return False
    from skyctl.store.state import FleetState

    with FleetState(paths.database) as state:
        if state.get("going_down"):
            return False
        rows = state.processes()
        return any(row.alive() for row in rows) or bool(rows and state.unrecorded_processes())


def refuse_another_file(ref: FleetRef) -> None:
    """A copied directory is a likely mistake: its commands would act on another fleet's servers, or
    the records of them. A file that was moved goes on where it was.

    Raises:
        ConflictError: the fleet runs, or is attached, from another file of its name, still there.
    """
    file, before = ref.file, Path(origin_of(ref.paths).get("file") or "")
    if file is None or file.parent == ref.paths.directory:  # not the user's
        return
    try:
        if not (before.is_file() and file.is_file()) or before.samefile(file):
            return
    except OSError:  # it is out of reach
        return
    runs = supervisor_running(ref.paths) or left_alone(ref.paths)
    if not (runs or ref.attached):
        return
    with contextlib.suppress(FleetFileError):  # it may be being edited, and be that fleet's still
        if _from_files([before]).name != ref.name:
            return
    raise ConflictError(
        f"fleet {ref.name} is {'up' if runs else 'attached'} already, from {before}",
        hint=f"give this one a `name:` of its own, or use that one: --fleet {ref.name}",
    )


def _choose(files: Files, name: str | None) -> Sequence[Path] | str:
    """The fleet files or the name of a known fleet."""
    default = Path(DEFAULT_FILE)
    if name is not None:
        if name in known_fleets():
            return name
        for candidate in (files, [default]):
            if candidate and candidate[0].exists() and _from_files(candidate).name == name:
                return candidate
        raise NotFoundError(f"there is no fleet named {name!r}", hint=_named_advice(name, default))
    if files:
        return files
    if default.exists():
        return [default, *_overrides(default)]
    fleets = known_fleets()
    running = [n for n in fleets if supervisor_running(fleet_paths(n))]
    for names in (running, fleets):
        if len(names) == 1:
            return names[0]
    if fleets:
        raise UsageError(f"there is no {DEFAULT_FILE} here and several fleets", hint=_advice())
    raise NotFoundError(f"there is no {DEFAULT_FILE} here and no fleet", hint=_advice())


def _overrides(file: Path) -> list[Path]:
    """The files that override this one in the fleet that is up from it: without them a command
    would be about another fleet file than the one in force.
    """
    for name in known_fleets():
        paths, origin = fleet_paths(name), origin_of(fleet_paths(name))
        if origin.get("file") == str(file.absolute()) and supervisor_running(paths):
            return [path for path in map(Path, origin.get("overrides", ())) if path.exists()]
    return []


def _advice() -> str:
    fleets = known_fleets()
    if fleets:
        return f"name one with --fleet: {_listed(fleets)}; or give its file with -f"
    return "write a first fleet file with: skyctl init   (or give one with -f)"


def _listed(names: Sequence[str]) -> str:
    """`a, b; attached: c; down: d, e`: running fleets come first."""
    states: dict[str, list[str]] = {"": [], "attached: ": [], "down: ": []}
    for name in names:
        state = "" if supervisor_running(fleet_paths(name)) else "down: "
        if state:
            with contextlib.suppress(SkyctlError, OSError):
                state = "attached: " if _from_name(name).attached else state
        states[state].append(name)
    return "; ".join(state + ", ".join(fleets) for state, fleets in states.items() if fleets)


def _named_advice(name: str, default: Path) -> str:
    """What to type instead of `--fleet name`."""
    if ":" in name:
        return f"a fleet of another machine is given by its supervisor's URL: https://{name}"
    fleets = known_fleets()
    if near := difflib.get_close_matches(name, fleets, n=1):
        return f"did you mean --fleet {near[0]}"
    if fleets:
        return f"this user's fleets: {_listed(fleets)}"
    if default.exists():
        return f"leave --fleet out: {default} is the fleet here"
    return "no fleet was started yet: go to the directory of its fleet file and type skyctl up"


def _from_files(files: Sequence[Path]) -> FleetRef:
    if len(files) == 1 and (ref := _up_from(files[0])) is not None:
        return ref
    from skyctl.fleetfile.load import is_stream, load_fleet

    loaded = load_fleet(*files)
    name = loaded.config.name
    lasting = all(file.is_file() and not is_stream(file) for file in files)
    again = tuple(file.absolute() for file in files if lasting)
    return FleetRef(name, fleet_paths(name), loaded.config, loaded.base_dir, again, loaded.source)


def _up_from(file: Path) -> FleetRef | None:
    """The fleet that is up from this very file, which was checked then. None without one, or if the
    file depends on the environment (`${VAR}`).
    """
    absolute = file.absolute()
    with contextlib.suppress(OSError):
        if not file.is_file():  # a pipe can be read only once
            return None
        text = file.read_bytes()
        for name in known_fleets() if b"$" not in text else ():
            paths = fleet_paths(name)
            origin = origin_of(paths)
            if (origin.get("file"), origin.get("kind")) != (str(absolute), "supervised"):
                continue
            if paths.fleet_file.read_bytes() == text and supervisor_running(paths):
                return FleetRef(name, paths, None, absolute.parent, (absolute,))
    return None


def _from_name(name: str) -> FleetRef:
    from skyctl.fleetfile.load import load_fleet

    paths = fleet_paths(name)
    origin = origin_of(paths)
    base_dir = origin.get("base_dir")
    originals = [Path(file) for file in (origin.get("file"), *origin.get("overrides", ())) if file]
    if originals and all(map(Path.exists, originals)):
        try:
            ref = _from_files(originals)
            if ref.name == name:
                return ref
        except FleetFileError:
            if not paths.fleet_file.exists():
                raise
    loaded = load_fleet(paths.fleet_file, base_dir=Path(base_dir) if base_dir else None)
    return FleetRef(name, paths, loaded.config, loaded.base_dir)
