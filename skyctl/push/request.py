"""What a push is asked for, what it knows of the fleet, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from skyctl.errors import StateUnwritable
from skyctl.http.target import ServerTarget
from skyctl.states import PauseMode
from skyctl.units import count_of

if TYPE_CHECKING:
    from skyctl.engines.base import Server
    from skyctl.launch.base import Node
    from skyctl.live.offer import Live
    from skyctl.push.trainer import Trainer
    from skyctl.store.expected import Expectations
    from skyctl.store.fleet_weights import FleetWeights
    from skyctl.store.journal import PushRecord

THIS_JOB = "ID"
"""Stands for the job in a hint of `skyctl jobs show`: a push does not know its number."""
Layout = Literal["auto", "runtime", "checkpoint"]


def usual_mode(*, leaves_router: bool) -> PauseMode:
    """The pause mode unless one is given: running requests are frozen, except where servers are
    drained.
    """
    return "wait" if leaves_router else "keep"


def live_source(ranks: int) -> str:
    """What is shown in place of a checkpoint's path for a trainer's live push."""
    return f"live, from {count_of(ranks, 'rank')} of a trainer"


@dataclass(frozen=True)
class PushRequest:
    """What is to be pushed, and how."""

    checkpoint: str
    """Its directory; "" with transport `store.state.TRAINER`, unless the trainer has also
    written its weights to disk."""
    transport: str = "auto"
    """How weights travel; "auto" takes the fleet file's, or what the servers can do."""
    chunk_size: int | None = None
    """Bytes per chunk; None takes the fleet's."""
    weight_version: str | None = None
    """The label of the new weights; None derives one from the checkpoint's digest."""
    pause_mode: PauseMode = "keep"
    """What becomes of running requests."""
    verify: bool | None = None
    """Compare what servers hold afterwards with the checkpoint and with each other; None takes
    the fleet file's."""
    dry_run: bool = False
    """Check everything, and touch nothing."""
    scan_nan: bool | None = None
    """Refuse NaN and infinity: True scans all weights before a server is touched, False
    none, None those that skyctl reads on their way."""
    allow_unproven_reload: bool = False
    """Accept weights whose digests are not the expected ones."""
    allow_config: tuple[str, ...] = ()
    """Keys of config.json in which the checkpoint may differ from what the servers run, "*"
    for all."""
    expected_digest: str | None = None
    """The checkpoint's `identity_digest` when it was pushed before: one that has changed
    since is refused."""
    traceparent: str | None = None
    """The caller's W3C trace context."""
    trial: dict[str, Any] | None = None
    """Prompts that the new weights must answer as expected (`push/trial_file.py`), if any."""
    keep: bool = False
    """The fleet makes its own copy of the checkpoint, and keeps it."""
    rolling: int = 0
    """How many servers are updated at a time while the others serve; 0: all at once."""
    colocated: bool = False
    """Sleeping servers are woken for it."""
    sleep_after: int = 0
    """The level at which servers sleep afterwards; 0: none."""
    stage: Literal["auto", "gpu", "host", "stream"] = "auto"
    """Where the checkpoint is before servers are frozen (`push/forecast.py`)."""
    layout: Layout = "auto"
    """How it gets into their parameters (`push/layouts.py`)."""
    stage_rate: int | None = None
    """Bytes per second that the sender reads at most while servers are not frozen; None
    takes the fleet's."""
    weights_digest: str | None = None
    """The digest that servers must have afterwards; None: the caller does not know it."""
    expected_content: str | None = None
    """Its content digest when it was pushed before: files that have changed since pass if
    they still have it."""
    written: str = ""
    """The checkpoint as the user wrote it, if that was a link or a hub id."""
    ranks: int = 0
    """How many ranks of a trainer have written the checkpoint from their memory; 0: they have
    not."""
    servers: tuple[str, ...] = ()
    """Those of a canary, which alone get it; () for all servers."""
    draft: str = ""
    """The directory of the model that servers are to draft tokens with; "" if none was given."""
    expected_draft: str = ""
    """The `identity_digest` of that model when it was pushed before: one that has changed since is
    refused."""

    @property
    def leaves_router(self) -> bool:
        """Whether its servers leave the router and are drained first."""
        return self.trial is not None or self.rolling > 0

    def to_json(self) -> dict[str, Any]:
        """JSON mapping with one key per field."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PushRequest:
        """Inverse of `to_json`; unknown keys raise TypeError."""
        return cls(**data)


@dataclass(frozen=True)
class RecordedState:
    """What is on record of a server's weights before a push."""

    in_doubt: bool = False
    """An earlier push broke off there, and may have left an update session open."""
    half_updated: bool = False
    """That push may have sent something: it is scrubbed first."""
    thaw: bool = False
    """An earlier push froze it: this one resumes it, unless it sleeps."""
    verified_as: str = ""
    """The label that its present weights get before it is resumed; "" if they need none."""
    weights_awake: bool = False
    """It sleeps, except for its weights, which were woken."""
    sleep_level: int = 0
    """Its level of sleep."""
    paused: bool = False
    """It is to be paused when it wakes."""
    version: str = ""
    """The label that this fleet gave its weights; "" if it gave it none."""
    weights_digest: str = ""
    """The digest of its weights; "" if there is none."""
    launched_with: str = ""
    """Names the content it was started with (`push/verify.py`); "" if that is not certain,
    or something has been pushed since."""


@dataclass(frozen=True)
class PushServer:
    """One server of a push, as the fleet knows it."""

    target: ServerTarget
    """Its name, URL and engine."""
    backend: str = ""
    """The weight-transfer backend it was started with; "" for none or unknown."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What its workers run on."""
    gpus: tuple[int, ...] = ()
    """Physical indices of its GPUs."""
    world_size: int = 1
    """Its workers: tensor x pipeline x data parallel."""
    instance: str = ""
    """Identifies the running process: while it is the same, a group that the server joined
    still stands; "" when unknown, never assumed."""
    recorded: RecordedState = RecordedState()
    """What is on record of its weights."""
    arguments: str = ""
    """Identifies the arguments it was started with; "" if unknown."""
    node: Node | None = None
    """The machine that a launcher placed it on; None for this one, and for servers that
    skyctl did not start."""
    machines: int = 1
    """How many machines it runs on."""

    @property
    def name(self) -> str:
        return self.target.name


@dataclass(frozen=True)
class Sibling:
    """A server whose weights another of its fleet copies (`push/sibling_way.py`)."""

    control: Server
    """Its control routes."""
    directory: str
    """Where its workers on CPU have their buffers, which are files."""

    @property
    def name(self) -> str:
        return self.control.target.name


def _nothing_expected() -> Expectations:
    from skyctl.store.expected import Expectations

    return Expectations()


@dataclass(frozen=True)
class Timeouts:
    """How long the parts of a push may take."""

    rendezvous_s: float = 30.0
    """For a group to form."""
    update_s: float = 120.0
    """For a call that loads weights."""
    control_s: float = 30.0
    """For any other call."""
    drain_s: float = 30.0
    """For requests to end in a server that left the router."""


@dataclass(frozen=True)
class Reading:
    """How senders read a checkpoint."""

    chunk_size: int = 256 * 1024 * 1024
    """Bytes per chunk, unless the request says."""
    stage_rate: int | None = None
    """Bytes per second that are read at most while servers serve; None: no bound."""
    one_reader: bool = False
    """Of the senders on several machines one reads, and the others receive from it."""


@dataclass(frozen=True)
class Defaults:
    """What holds where a request does not say."""

    transport: str = "auto"
    """How weights travel; the request says "auto"."""
    verify: bool = True
    """Whether servers are compared afterwards; the request says None."""


@dataclass(frozen=True)
class PushFleet:
    """The servers of a push, what is known of their weights, and the bounds it keeps."""

    name: str
    """The name of the fleet."""
    servers: tuple[PushServer, ...]
    """All servers of the push."""
    model_path: str | None = None
    """Directory or hub id of the checkpoint that the servers run now; None when unknown."""
    timeouts: Timeouts = Timeouts()
    """How long its parts may take."""
    reading: Reading = Reading()
    """How checkpoints are read."""
    python: str = ""
    """The interpreter that runs the sender process (it needs torch); "" is this one."""
    defaults: Defaults = Defaults()
    """What the fleet file says."""
    pushes: tuple[PushRecord, ...] = ()
    """The fleet's latest pushes, newest first."""
    committed: FleetWeights | None = None
    """The weights that the fleet serves, and returns to when a push is refused; None if unknown."""
    expected: Expectations = field(default_factory=_nothing_expected)
    """The digests that servers must have."""
    trainer: Trainer | None = None
    """Sends the weights of a push for which skyctl has no sender."""
    versions: tuple[str, ...] = ()
    """The versions that the fleet has had, oldest first."""
    live: Live | None = None
    """Weights in a trainer's memory, that servers copy from."""
    sibling: Sibling | None = None
    """A server that has the weights, which the only server of this push copies from it."""

    def verifies(self, request: PushRequest) -> bool:
        """Whether this push compares what the servers hold afterwards."""
        return self.defaults.verify if request.verify is None else request.verify

    @property
    def leaves_machine(self) -> bool:
        """Whether any of its servers is on another machine than this process."""
        return any(server.node is not None for server in self.servers)


class PushObserver:
    """Receives a push's progress as it happens; this one ignores it. Calls must return at once.

    A call that raises StateUnwritable says that an intent is not on record: the push undoes itself.
    """

    def stage(self, name: str) -> None:
        """A stage (see `PushStage`) begins."""

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` of the checkpoint are loaded by every server still in the push."""

    def server(self, name: str, state: str, detail: str = "", requests: int = 0) -> None:
        """A server's state (see `PushState`); `detail` of WEIGHED is the digest it had before. It
        waits for so many `requests` to end.
        """

    def intend(self, states: Mapping[str, str]) -> None:
        """The states that several servers, by name, are about to enter, on record first."""

    def note(self, message: str) -> None:
        """One line the operator should read."""

    def fact(self, kind: str, data: Mapping[str, Any]) -> None:
        """What a push records for whoever finds it dead.

        prepared  {checkpoint, checkpoint_digest, draft, draft_digest}: which files it pushes (""
                  for weights that a trainer sends and that are in no file, and a digest that no
                  other push has)
        verified  {version, checkpoint, checkpoint_digest, content_digest, transport, draft,
                  draft_digest, whole, servers}: these servers (name → weights digest, "" if not
                  requested) hold all of it, paused; `whole`: it is the fleet's version
        """


class CarefulObserver(PushObserver):
    """Passes calls on to all observers, in order. Of what one raises, only a lost intent stops the
    push: servers are frozen, and a progress bar may fail. `failures` keeps the rest.
    """

    def __init__(self, *observers: PushObserver) -> None:
        self._observers = observers
        self.failures: list[Exception] = []

    def stage(self, name: str) -> None:
        self._pass_on(lambda observer: observer.stage(name))

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self._pass_on(lambda observer: observer.progress(done_bytes, total_bytes))

    def server(self, name: str, state: str, detail: str = "", requests: int = 0) -> None:
        self._pass_on(lambda observer: observer.server(name, state, detail, requests))

    def intend(self, states: Mapping[str, str]) -> None:
        self._pass_on(lambda observer: observer.intend(states))

    def note(self, message: str) -> None:
        self._pass_on(lambda observer: observer.note(message))

    def fact(self, kind: str, data: Mapping[str, Any]) -> None:
        self._pass_on(lambda observer: observer.fact(kind, data))

    def _pass_on(self, call: Callable[[PushObserver], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except StateUnwritable:
                raise
            except Exception as error:
                self.failures.append(error)


@dataclass(frozen=True)
class ServerPush:
    """How a push left one server. Times in seconds."""

    server: str
    """Its name."""
    ok: bool
    """It serves as it should, at the new version or at the one before."""
    state: str
    """A `PushState`: ready, paused, asleep or quarantined (paused, and not to be routed to)."""
    version: str | None = None
    """The weight version it holds; None: unknown, it may be half updated."""
    weights_digest: str = ""
    """The digest of its verified weights; "" if it was not verified."""
    detail: str = ""
    """What went wrong there."""
    sleep_level: int | None = None
    """Its level of sleep; None if the push did not change it."""
    weights_awake: bool = False
    """It sleeps, but its weights do not."""
    freeze_s: float | None = None
    """From its own pause to its own resume; None unless it was both frozen and resumed."""
    load_s: float = 0.0
    """In calls that load."""
    wait_s: float = 0.0
    """Between these."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class PushResult:
    """The result of a push. Sizes in bytes, times in seconds."""

    version: str
    """The label of the new weights."""
    checkpoint: str
    """Its directory; "" for weights that are in no file."""
    checkpoint_digest: str
    """The cheap identity of the checkpoint: headers and sizes."""
    transport: str
    """How the weights travelled."""
    total_bytes: int
    """The size of the weights."""
    chunks: int
    """Chunks that were sent; 0 where servers read by themselves."""
    seconds: float
    """All of it."""
    gb_per_s: float
    """10^9 bytes per second while weights were loaded."""
    freeze_window_s: float
    """From the first pause sent to the last resume answered."""
    stages: dict[str, float]
    """Seconds of each `PushStage`."""
    servers: list[ServerPush]
    """How each server was left."""
    content_digest: str = ""
    """Covers every byte that was sent; "" for transports that send none, and for a dry run."""
    trial: list[dict[str, Any]] = field(default_factory=list)
    """One TrialResult mapping per server and prompt."""
    notes: list[str] = field(default_factory=list)
    """Lines the operator should read."""
    compared: dict[str, int] | None = None
    """How much of the checkpoint every server was seen to hold: {"tensors", "of_tensors",
    "bytes", "of_bytes"}; None if nothing was compared."""
    layout_share: float = 0.0
    """The share of the weights, 0 to 1, that servers copied into their parameters; vLLM's
    loader took the others."""
    ranks: int = 0
    """How many ranks of a trainer the weights came from; 0 if they were a checkpoint."""
    draft: str = ""
    """The directory of the model that servers draft tokens with; "" if the checkpoint has it."""
    draft_digest: str = ""
    """The identity of that model's files."""
    learned: dict[str, Any] | None = None
    """What was found out for later pushes; not part of the JSON."""
    plan: dict[str, Any] | None = None
    """What would be done; of a dry run only."""

    def to_json(self) -> dict[str, Any]:
        """JSON mapping with one key per field; servers become mappings."""
        data = {**vars(self), "servers": [server.to_json() for server in self.servers]}
        del data["learned"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PushResult:
        """Inverse of `to_json`."""
        return cls(**{**data, "servers": [ServerPush(**server) for server in data["servers"]]})
