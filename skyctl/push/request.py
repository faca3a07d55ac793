"""What a push is asked for, what it knows of the fleet, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from skyctl.errors import StateUnwritable
from skyctl.http.target import ServerTarget

if TYPE_CHECKING:
    from skyctl.launch.base import Node
    from skyctl.push.trainer import Trainer
    from skyctl.store.expected import Expectations
    from skyctl.store.journal import PushRecord
    from skyctl.store.state import FleetWeights

THIS_JOB = "ID"
"""Stands for the job in a hint of `skyctl jobs show`: a push does not know its number."""
PauseMode = Literal["keep", "wait", "abort"]
Layout = Literal["auto", "runtime", "checkpoint"]


def usual_mode(*, leaves_router: bool) -> PauseMode:
    """The pause mode unless one is given: running requests are frozen, except where servers are
    drained.
    """
    return "wait" if leaves_router else "keep"


@dataclass(frozen=True)
class PushRequest:
    """What the user asked for. `chunk_size` is in bytes; None takes the fleet's.

    `weight_version` None derives one from the checkpoint's digest. `traceparent` is the caller's
    W3C trace context. `scan_nan` refuses NaN and infinity: True scans all weights before a server
    is touched, False none, None those that the sender reads on its way. `allow_unproven_reload`
    accepts weights whose digests are not the expected ones. `allow_config` are keys of config.json
    in which the checkpoint may differ from what the servers run, "*" for all. `expected_digest` is
    the checkpoint's identity_digest when it was pushed before: one that has changed since is
    refused, unless its content is still `expected_content` (`push/versions.py`).
    `canary` is what `push/canary.py` reads from a canary file. `keep`: the fleet makes its own
    copy, and keeps it. `rolling` is how many servers are updated at a time while the others serve,
    0 for all. `colocated`: sleeping servers are woken for it. `sleep_after` is the level to sleep
    at afterwards, 0: none. `stage` is where the checkpoint is before servers are frozen
    (`push/forecast.py`), `layout` how it gets into their parameters (`push/layouts.py`).
    `stage_rate`: bytes per second at which the sender reads at most while servers are not frozen;
    None takes the fleet's.
    `weights_digest` is the digest that servers must have, if the caller knows it. With transport
    `store.state.TRAINER` a trainer sends the weights itself, and `checkpoint` is "" unless it has
    also written them to disk (`push/trainer.py`).
    """

    checkpoint: str
    transport: str = "auto"
    chunk_size: int | None = None
    weight_version: str | None = None
    pause_mode: PauseMode = "keep"
    verify: bool = True
    dry_run: bool = False
    scan_nan: bool | None = None
    allow_unproven_reload: bool = False
    allow_config: tuple[str, ...] = ()
    expected_digest: str | None = None
    traceparent: str | None = None
    canary: dict[str, Any] | None = None
    keep: bool = False
    rolling: int = 0
    colocated: bool = False
    sleep_after: int = 0
    stage: Literal["auto", "gpu", "host", "stream"] = "auto"
    layout: Layout = "auto"
    stage_rate: int | None = None
    weights_digest: str | None = None
    expected_content: str | None = None
    written: str = ""
    """The checkpoint as the user wrote it, if that was a link or a hub id."""

    @property
    def leaves_router(self) -> bool:
        """Whether its servers leave the router and are drained first."""
        return self.canary is not None or self.rolling > 0

    def to_json(self) -> dict[str, Any]:
        """JSON mapping with one key per field."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PushRequest:
        """Inverse of `to_json`; unknown keys raise TypeError."""
        return cls(**data)


@dataclass(frozen=True)
class PushServer:
    """One server of a push. `backend` is the weight-transfer backend it was started with, "" for
    none or unknown; `gpus` are physical indices; `world_size` counts its workers (tensor x pipeline
    x data parallel). `instance` identifies the running process: while it is the same, a group that
    the server joined still stands ("" when unknown: never assumed). `half_updated`: an earlier push
    broke off there, so it is scrubbed first; `thaw`: that push froze it, so this one resumes it.
    `verified_as` is the label that its present weights get before that, "" if they need none.
    `weights_awake`: it sleeps, except for its weights, which were woken. `sleep_level` is its level
    of sleep as recorded; `paused`: somebody wants it paused when it wakes. `weights_digest` is the
    recorded digest of its weights, "" if there is none; `launched_with` names the content it was
    started with (`push/expected.py`), "" if that is not certain or something has been pushed since;
    `arguments` identifies the arguments it was started with, "" if unknown. `node` is the machine
    that a launcher placed it on, None for this one and for servers that something else started;
    `machines` is how many it runs on.
    """

    target: ServerTarget
    backend: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    gpus: tuple[int, ...] = ()
    world_size: int = 1
    instance: str = ""
    half_updated: bool = False
    thaw: bool = False
    verified_as: str = ""
    weights_awake: bool = False
    sleep_level: int = 0
    paused: bool = False
    weights_digest: str = ""
    launched_with: str = ""
    arguments: str = ""
    node: Node | None = None
    machines: int = 1

    @property
    def name(self) -> str:
        return self.target.name


def _nothing_expected() -> Expectations:
    from skyctl.store.expected import Expectations

    return Expectations()


@dataclass(frozen=True)
class PushFleet:
    """The servers of a push and the bounds it keeps.

    `model_path` is the directory or hub id of the checkpoint the servers run now, None when
    unknown. `transport` is the fleet file's, used when the request says "auto". `python` is the
    interpreter that runs the sender process (it needs torch); "" is this one. `committed` are the
    weights that the fleet serves, and returns to when a push is refused; None if unknown. `pushes`
    are the fleet's latest, newest first. `expected` are the digests that servers must have.
    `stage_rate` is None for no
    bound. `one_reader`: of the senders on several machines one reads, and the others receive from
    it. `trainer` sends the weights of a push that skyctl has no sender for.
    """

    name: str
    servers: tuple[PushServer, ...]
    model_path: str | None = None
    chunk_size: int = 256 * 1024 * 1024
    rendezvous_timeout_s: float = 30.0
    update_timeout_s: float = 120.0
    control_timeout_s: float = 30.0
    python: str = ""
    transport: str = "auto"
    stage_rate: int | None = None
    one_reader: bool = False
    drain_timeout_s: float = 30.0
    pushes: tuple[PushRecord, ...] = ()
    committed: FleetWeights | None = None
    expected: Expectations = field(default_factory=_nothing_expected)
    trainer: Trainer | None = None


class PushObserver:
    """Receives a push's progress as it happens; this one ignores it. Calls must return at once.

    A call that raises StateUnwritable says that an intent is not on record: the push undoes itself.
    """

    def stage(self, name: str) -> None:
        """A stage (see `PushStage`) begins."""

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` of the checkpoint are loaded by every server still in the push."""

    def server(self, name: str, state: str, detail: str = "") -> None:
        """A server's state (see `PushState`); `detail` of WEIGHED is the digest it had before."""

    def intend(self, states: Mapping[str, str]) -> None:
        """The states that several servers, by name, are about to enter."""

    def note(self, message: str) -> None:
        """One line the operator should read."""

    def fact(self, kind: str, data: Mapping[str, Any]) -> None:
        """What a push records for whoever finds it dead.

        prepared  {checkpoint, checkpoint_digest}: which files it pushes ("" for weights that a
                  trainer sends and that are in no file, and a digest that no other push has)
        verified  {version, checkpoint, checkpoint_digest, content_digest, transport, whole,
                  servers}: these servers (name → weights digest, "" if not requested) hold all of
                  it, paused; `whole`: it is the fleet's version
        """


class CarefulObserver(PushObserver):
    """Passes calls on to all observers, in order. Of what one raises, only a lost intent stops the
    push: servers are frozen, and a progress bar may fail. `failures` keeps the rest.
    """

    def __init__(self, *observers: PushObserver) -> None:
        self._observers = observers
        self.failures: list[Exception] = []

    def stage(self, name: str) -> None:
        self._tell(lambda observer: observer.stage(name))

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self._tell(lambda observer: observer.progress(done_bytes, total_bytes))

    def server(self, name: str, state: str, detail: str = "") -> None:
        self._tell(lambda observer: observer.server(name, state, detail))

    def intend(self, states: Mapping[str, str]) -> None:
        self._tell(lambda observer: observer.intend(states))

    def note(self, message: str) -> None:
        self._tell(lambda observer: observer.note(message))

    def fact(self, kind: str, data: Mapping[str, Any]) -> None:
        self._tell(lambda observer: observer.fact(kind, data))

    def _tell(self, call: Callable[[PushObserver], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except StateUnwritable:
                raise
            except Exception as error:
                self.failures.append(error)


@dataclass(frozen=True)
class ServerPush:
    """How a push left one server. `state` is ready, paused, asleep or quarantined (paused, do not
    route).

    `version` is the weight version it holds; None is unknown (it may be half-updated).
    `sleep_level` is None if the push did not change it; `weights_awake`: it sleeps, but its weights
    do not. Seconds: `freeze_s` from its own pause to its own resume (None unless it was both frozen
    and resumed), `load_s` in calls that load, `wait_s` between these.
    """

    server: str
    ok: bool
    state: str
    version: str | None = None
    weights_digest: str = ""
    detail: str = ""
    sleep_level: int | None = None
    weights_awake: bool = False
    freeze_s: float | None = None
    load_s: float = 0.0
    wait_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PushResult:
    """The result of a push. Sizes in bytes, times in seconds, rate in 10^9 bytes per second.

    `checkpoint` is "" for weights that a trainer sent itself and that are in no file.
    `checkpoint_digest` is the cheap identity of the checkpoint (headers and sizes);
    `content_digest` covers every byte that was sent ("" for transports that send none, and for a
    dry run). `freeze_window_s` runs from the first pause sent to the last resume answered. `canary`
    has one CanaryResult mapping per server and prompt. `compared` is how much of the checkpoint
    every server was seen to hold: {"tensors", "of_tensors", "bytes", "of_bytes"}, None if nothing
    was compared. `layout_share` is the share of the weights, 0 to 1, that servers copied into their
    parameters; vLLM's loader took the rest. `learned` is what was found out
    for later pushes; it is not part of the JSON. `plan` is filled by a dry run only.
    """

    version: str
    checkpoint: str
    checkpoint_digest: str
    transport: str
    total_bytes: int
    chunks: int
    seconds: float
    gb_per_s: float
    freeze_window_s: float
    stages: dict[str, float]
    servers: list[ServerPush]
    content_digest: str = ""
    canary: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: dict[str, int] | None = None
    layout_share: float = 0.0
    learned: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON mapping with one key per field; servers become mappings."""
        data = asdict(replace(self, learned=None))
        del data["learned"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PushResult:
        """Inverse of `to_json`."""
        return cls(**{**data, "servers": [ServerPush(**server) for server in data["servers"]]})
