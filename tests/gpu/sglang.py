"""Two SGLang servers on one GPU, through skyctl from a fleet file, and a third that was started on
the other checkpoint and says what is right. Where there is a second GPU, a sender on it pushes to
the third by NCCL, which takes one process of a group on each GPU. Two more take LoRA adapters,
each on one of the checkpoints (`sglang_adapters.py`). `python -m tests.gpu.sglang WORK
OUT` prints a table; `tests/gpu/test_sglang.py` asserts the same steps. `scripts/gpu-sglang.sh` sets
a machine up for it.

The engine's contract and what else matters most come first. A step that runs when `LIMIT_S` is over
is stopped, and what is left when `DEADLINE_S` is over is not begun.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from benchmarks.checkpoints import write_checkpoint
from skyctl.engines.sglang.server import SGLangServer
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.launch.local.devices import discover_gpus, free_gpu_memory, visible_gpus
from tests.gpu.devices import available
from tests.gpu.sglang_adapters import TUNED_RIGHT, adapters, adapters_return, write_adapters
from tests.integration.fleet_cli import FleetCli, bearer
from tests.stub.sglang_verbs import Verbs

SHAPE = "qwen3-4-layers"
LIMIT_S = float(os.environ.get("LIMIT_S", 310))
DEADLINE_S = LIMIT_S - 40
UP_TIMEOUT_S = 240.0
CONTRACT_TIMEOUT_S = 150.0
SERVER: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    # five servers start side by side: none may take a share of what the others have not taken yet
    "mem-fraction-static": 0.5,
    "max-total-tokens": 500_000,
    "context-length": 2048,
    "max-running-requests": 64,
}
PROMPTS = [list(range(5, 25)), [40, 41, 42, 43], [7, 300, 12]]


@dataclass(frozen=True)
class Place:
    """Where a fleet's servers are, by name, and what they ask for. It stays when they restart."""

    servers: dict[str, str]
    key: str
    token: str

    @classmethod
    def of(cls, fleet: FleetCli) -> Place:
        return cls(fleet.data("urls", timeout_s=30)["servers"], fleet.key, fleet.control_token)


@dataclass
class SGLangRun:
    """The fleet `sgl` (sgl-0 with its prefix cache, plain-0 without) on checkpoint `a`, and the
    fleet `right`, a server on `b`; `tuned` has a server on `a` that takes adapters, and
    `tuned-right` the same on `b`. `extra` goes
    into all fleet files. `transports` are tried; the last one is what the file of `sgl` says.
    `sender_gpu` is left to the sender of `right`; None where there is no second GPU."""

    directory: Path
    extra: dict[str, Any] = field(default_factory=lambda: on_one_gpu())
    router: bool = False
    sender_gpu: int | None = None
    transports: tuple[str, ...] = ("disk", "ipc")
    write: Callable[[Path, int], object] = lambda path, seed: write_checkpoint(path, SHAPE, seed)
    held_tokens: int = 1800
    pushes: int = 12
    verbs: int = 60

    def __post_init__(self) -> None:
        self.fleets = {name: self._fleet(name) for name in ("sgl", "right", "tuned", TUNED_RIGHT)}
        self.cli = self.fleets["sgl"]
        self.places: dict[str, Place] = {}
        self.holding: list[threading.Thread] = []
        self.a, self.b = self.directory / "a", self.directory / "b"
        for seed, path in enumerate((self.a, self.b), 1):
            self.write(path, seed)
        plain = {"name": "plain", "args": {"disable-radix-cache": True}}
        self._write("sgl", self.a, replicas=[{"name": "sgl"}, plain])
        by_nccl = {} if self.sender_gpu is None else {"weight_transfer": {"transport": "nccl"}}
        self._write("right", self.b, replicas=1, **by_nccl)
        self.x1, self.x2 = write_adapters(self.a, self.directory)
        self.remembered: dict[str, list[int]] = {}  # what `tuned` answered when it was killed
        self.tuned_failed: BaseException | None = None
        loaded = {"lora-paths": [f"own={self.x1}"]}  # by SGLang itself, at its start
        lora = {"max_adapters": 2, "adapters": {"first": str(self.x2)}}
        args = self.extra["args"] | loaded
        self._write("tuned", self.a, replicas=1, lora=lora, args=args)
        self._write(TUNED_RIGHT, self.b, replicas=1, lora=lora, args=args)

    def _fleet(self, name: str) -> FleetCli:
        (self.directory / name).mkdir(parents=True, exist_ok=True)
        return FleetCli(self.directory / name, self.directory / "home")

    def _write(self, name: str, model: Path, **more: Any) -> None:
        settings = {
            "name": name,
            "engine": "sglang",
            "model": str(model),
            "served_model_name": "tiny",
            "router": {"enabled": self.router and name == "sgl"},
            "weight_transfer": {"transport": self.transports[-1]},
            "health": {"startup_timeout_s": UP_TIMEOUT_S},
            **self.extra,
            **more,
        }
        (self.directory / name / "fleet.yaml").write_text(yaml.safe_dump(settings))

    # what steps use

    def up(self) -> None:
        """That a server with adapters failed to start is for the step that needs it."""
        failed: dict[str, BaseException] = {}

        def one(name: str) -> None:
            try:
                self.fleets[name].run("up", timeout_s=UP_TIMEOUT_S + 30)
                self.places[name] = Place.of(self.fleets[name])
            except BaseException as error:
                failed[name] = error

        threads = [threading.Thread(target=one, args=(name,)) for name in self.fleets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.tuned_failed = failed.pop("tuned", None) or failed.pop(TUNED_RIGHT, None)
        failed.pop(TUNED_RIGHT, None)
        for error in failed.values():
            raise error

    def down(self) -> None:
        for fleet in self.fleets.values():
            fleet.run("down", expect=None, timeout_s=90)

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = self.cli.data("status", timeout_s=30)["replicas"]
        return {row["name"]: row for row in rows if row["name"] in ("sgl-0", "plain-0")}

    def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        key = next(p.key for p in self.places.values() if url in p.servers.values())
        answer = httpx.post(f"{url}/generate", json=body, headers=bearer(key), timeout=90)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def answers(self, fleet: str = "sgl") -> dict[str, list[list[int]]]:
        """Greedy tokens of each server. Its cache is emptied first: with a prefix that is cached
        the same sums are made in another order."""
        place = self.places[fleet]
        for url in place.servers.values():
            done = httpx.post(f"{url}/flush_cache", headers=bearer(place.token), timeout=30)
            assert done.status_code == 200, done.text
        settings = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
        return {
            name: [
                self.post(url, {"input_ids": p, "sampling_params": settings})["output_ids"]
                for p in PROMPTS
            ]
            for name, url in place.servers.items()
        }

    def push(self, path: Path, *more: str) -> dict[str, Any]:
        job: dict[str, Any] = self.cli.data("sync-weights", str(path), *more, timeout_s=90)["job"]
        result: dict[str, Any] = job["result"]
        return result

    def held(
        self, server: str, *, fleet: str = "sgl", body: dict[str, Any] | None = None
    ) -> tuple[threading.Thread, dict[str, Any]]:
        """A long request on a server, under way; what it came to."""
        url, result = self.places[fleet].servers[server], dict[str, Any]()
        settings = {"temperature": 0.0, "max_new_tokens": self.held_tokens, "ignore_eos": True}
        asked = body or {"input_ids": list(range(30, 60)), "sampling_params": settings}

        def ask() -> None:
            try:
                result.update(self.post(url, asked))
            except Exception as error:
                result["error"] = repr(error)

        thread = threading.Thread(target=ask)
        self.holding.append(thread)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive(), f"it was over before anything was done: {result}"
        return thread, result

    def ended(self, held: tuple[threading.Thread, dict[str, Any]]) -> tuple[int, str]:
        """Tokens and finish reason of a request that was held."""
        thread, result = held
        thread.join(60)
        assert not thread.is_alive(), "it never ended"
        assert "error" not in result, result
        return len(result["output_ids"]), result["meta_info"]["finish_reason"]["type"]

    def recover(self) -> None:
        """After a step that failed: what it held ends, and the next step finds a fleet on `a`."""
        self.cli.run("resume", expect=None, timeout_s=60)
        for thread in self.holding:
            thread.join(60)
        self.cli.run("sync-weights", str(self.a), "--colocated", expect=None, timeout_s=90)
        right = ("sync-weights", str(self.b), "--transport", "disk")
        self.fleets["right"].run(*right, expect=None, timeout_s=90)

    def refusal(self, *command: str) -> str:
        done = self.cli.run(*command, "--json", expect=None, timeout_s=90)
        assert done.returncode, f"skyctl {' '.join(command)} was not refused: {done.stdout}"
        return done.stdout


def on_one_gpu() -> dict[str, Any]:
    """All servers on the first GPU that is ours."""
    return {
        "share_gpus": True,
        "args": SERVER,
        **({"gpus": available()[:1]} if available() else {}),
    }


def second_gpu() -> int | None:
    """For a sender by NCCL; None where there is none."""
    return available()[1] if len(available()) > 1 else None


def used_mib() -> int:
    """Of the first GPU that is ours; 0 without one."""
    gpus = visible_gpus(discover_gpus(), os.environ)
    if not gpus:
        return 0
    return (gpus[0].memory_bytes - free_gpu_memory()[gpus[0].index]) // 1024**2


# --- the steps, in their order --------------------------------------------------------------------


def starts(run: SGLangRun) -> str:
    began = time.monotonic()
    run.up()
    assert {row["state"] for row in run.rows().values()} == {"ready"}, run.rows()
    return f"five servers in {time.monotonic() - began:.0f} s"


def a_b_a(run: SGLangRun) -> str:
    right, first = run.answers("right")["right-0"], run.answers()
    assert first["sgl-0"] == first["plain-0"] != right
    verified = run.fleets["right"].data("weights", "verify", timeout_s=90)["servers"][0]["digest"]
    frozen = []
    for transport in run.transports:
        pushed = run.push(run.b, "--transport", transport)
        assert run.answers() == {"sgl-0": right, "plain-0": right}, transport
        digests = {s["weights_digest"] for s in pushed["servers"]}
        assert digests == {verified}, f"{transport}: {digests}, {verified} of one started on it"
        back = run.push(run.a, "--transport", transport)
        assert run.answers() == first, transport
        freezes = [1000 * one["freeze_window_s"] for one in (pushed, back)]
        frozen.append(f"{transport} frozen {freezes[0]:.0f}, {freezes[1]:.0f} ms")
    return f"tokens and checksums of a server started on B; {'; '.join(frozen)}"


def by_nccl(run: SGLangRun) -> str:
    if run.sender_gpu is None:
        pytest.skip("it needs a second GPU")
    fleet = run.fleets["right"]

    def push(path: Path) -> float:
        job = fleet.data("sync-weights", str(path), "--transport", "nccl", timeout_s=90)["job"]
        return 1000 * float(job["result"]["freeze_window_s"])

    def digest(name: str) -> set[str]:
        rows = run.fleets[name].data("weights", "verify", timeout_s=90)["servers"]
        return {row["digest"] for row in rows}

    on_a, on_b = run.answers()["sgl-0"], run.answers("right")["right-0"]
    pids = {row["pid"] for row in fleet.data("status", timeout_s=30)["replicas"]}
    forecast = fleet.data("sync-weights", str(run.a), "--dry-run", timeout_s=90)
    assert "nccl" in str(forecast), forecast
    freezes = [push(run.a)]
    assert run.answers("right")["right-0"] == on_a and digest("right") == digest("sgl")
    freezes.append(push(run.b))
    assert run.answers("right")["right-0"] == on_b
    before = used_mib()
    for number in range(run.pushes):
        freezes.append(push(run.a if number % 2 == 0 else run.b))
    # a sender that died: the server leaves its group, and joins that of the next
    for _ in range(3):
        _end_sender("right")
        freezes.append(push(run.a))
        assert run.answers("right")["right-0"] == on_a
        freezes.append(push(run.b))
    after = used_mib()
    assert run.answers("right")["right-0"] == on_b
    assert {row["pid"] for row in fleet.data("status", timeout_s=30)["replicas"]} == pids
    assert after - before < 300, f"{before} MiB before, {after} after"
    steady = statistics.median(freezes[2 : 2 + run.pushes])
    return (
        f"first {freezes[0]:.0f}, later {steady:.0f} ms (median of {run.pushes}); three senders "
        f"killed, then {', '.join(f'{f:.0f}' for f in freezes[2 + run.pushes :])} ms; {before} to "
        f"{after} MiB"
    )


def _end_sender(fleet: str) -> None:
    """Kill the sender that a fleet's supervisor keeps."""
    (sender,) = (
        process
        for process in psutil.process_iter(["cmdline", "ppid"])
        if "skyctl.transfer.sender" in (process.info["cmdline"] or ())
        and psutil.Process(process.info["ppid"]).cmdline()[-2:] == ["--fleet", fleet]
    )
    sender.kill()
    psutil.wait_procs([sender], timeout=10)


def many_pushes(run: SGLangRun) -> str:
    before, freezes = used_mib(), []
    for number in range(run.pushes):
        pushed = run.push(run.b if number % 2 == 0 else run.a)
        assert all(server["ok"] for server in pushed["servers"]), pushed
        freezes.append(1000 * pushed["freeze_window_s"])
    after = used_mib()
    assert after - before < 200, f"{before} MiB before, {after} after"
    frozen = f"frozen {statistics.median(freezes):.0f} ms (median)"
    return f"{run.pushes}; {frozen}; {before} to {after} MiB"


def pauses(run: SGLangRun) -> str:
    held = run.held("sgl-0")
    run.cli.run("pause", "--mode", "keep", timeout_s=60)
    time.sleep(1)
    assert held[0].is_alive()
    assert {row["state"] for row in run.rows().values()} == {"paused"}
    # an abort of what is held in place would never be answered
    run.cli.run("pause", "--mode", "abort", timeout_s=60)
    tokens, reason = run.ended(held)
    assert reason == "abort" and tokens < run.held_tokens, (tokens, reason)
    run.cli.run("resume", timeout_s=60)
    held = run.held("sgl-0")
    run.cli.run("pause", "--mode", "keep", timeout_s=60)
    run.cli.run("resume", timeout_s=60)
    assert run.ended(held) == (run.held_tokens, "length")
    held = run.held("sgl-0")
    run.cli.run("pause", "--mode", "wait", timeout_s=60)
    assert run.ended(held) == (run.held_tokens, "length")
    run.cli.run("resume", timeout_s=60)
    return "keep, keep then abort, wait"


def pushes_under_held(run: SGLangRun) -> str:
    before = run.answers()
    held = run.held("sgl-0")
    refused = run.refusal("sync-weights", str(run.b))
    assert "drops no cached KV" in refused, refused
    assert run.ended(held) == (run.held_tokens, "length")
    assert run.answers() == before
    held = run.held("plain-0")
    run.push(run.b)
    assert run.ended(held) == (run.held_tokens, "length")
    assert run.answers()["plain-0"] == run.answers("right")["right-0"]
    held = run.held("sgl-0")
    run.push(run.a, "--mode", "abort")
    assert run.ended(held)[1] == "abort"
    assert run.answers() == before
    return "with a prefix cache refused, without one carried on; abort"


def sleeps(run: SGLangRun) -> str:
    before, awake = run.answers(), used_mib()
    run.cli.run("sleep", timeout_s=90)
    asleep = used_mib()
    assert asleep < awake or not awake, f"{awake} MiB awake, {asleep} asleep"
    run.cli.run("wake", timeout_s=90)
    assert run.answers() == before, "other tokens after a sleep"
    run.cli.run("sleep", "--level", "2", timeout_s=90)
    if run.extra.get("device") != "cpu":  # which frees no memory
        assert "discarded" in run.refusal("wake")
    run.push(run.b, "--colocated")
    assert set(map(str, run.answers().values())) == {str(run.answers("right")["right-0"])}
    run.push(run.a)
    assert run.answers() == before
    return f"{awake} MiB awake, {asleep} asleep; into a sleeping fleet"


def restarts(run: SGLangRun) -> str:
    run.push(run.b)
    right, pid = run.answers("right")["right-0"], run.rows()["plain-0"]["pid"]
    psutil.Process(pid).kill()
    began = time.monotonic()
    while (row := run.rows()["plain-0"])["state"] != "ready" or row["pid"] == pid:
        assert time.monotonic() - began < UP_TIMEOUT_S, row
        time.sleep(1)
    took = time.monotonic() - began
    assert run.answers()["plain-0"] == right, "re-admitted with other weights than the fleet's"
    versions = {row["weight_version"] for row in run.rows().values()}
    assert len(versions) == 1, versions
    run.push(run.a)
    return f"back at the fleet's version after {took:.0f} s"


def any_verbs(run: SGLangRun) -> str:
    pids = {name: row["pid"] for name, row in run.rows().items()}
    before = run.answers()
    place = run.places["sgl"]

    async def live(url: str, seed: int) -> None:
        target = ServerTarget("s", url, place.token, "sglang")
        async with ControlClient() as client:
            server = SGLangServer(client, target, timeout_s=20.0)
            verbs = Verbs(
                server,
                client,
                [str(run.a), str(run.b)],
                random.Random(seed),
                wait_s=1.0,
                tokens=60,
            )
            try:
                for number in range(run.verbs):
                    others = verbs.others() if number % 3 == 0 else {}
                    await verbs.any({**verbs.ours(), **others})
            finally:
                await verbs.leave()
                await server.wake()  # resumes it, too, where its weights are whole
            if (await server.metrics()).sleep_level:
                raise AssertionError("still asleep")

    async def both() -> None:
        urls = place.servers.values()
        await asyncio.gather(*(live(url, seed) for seed, url in enumerate(urls)))

    began = time.monotonic()
    asyncio.run(asyncio.wait_for(both(), 120))
    now = {name: row["pid"] for name, row in run.rows().items()}
    assert now == pids, f"a server was ended: {pids}, {now}"
    run.push(run.a, "--colocated", "--mode", "abort")
    assert run.answers() == before
    return f"{run.verbs} on each server in {time.monotonic() - began:.0f} s, none was ended"


def looks(run: SGLangRun) -> str:
    assert run.cli.data("weights", "verify", timeout_s=90)["agree"] is True
    run.cli.run("top", "--once", timeout_s=60)
    told = run.cli.run("doctor", expect=None, timeout_s=120).stdout
    assert "SGLang 0." in told, told
    key, url = run.places["sgl"].key, run.places["sgl"].servers["sgl-0"]
    assert httpx.get(f"{url}/model_info", timeout=10).status_code == 401
    assert httpx.get(f"{url}/model_info", headers=bearer(key), timeout=10).status_code == 200
    assert httpx.post(f"{url}/pause_generation", headers=bearer(key), json={}).status_code == 401
    where = () if run.router else ("--server", "sgl-0")
    data = run.cli.data("generate", "hello", "--max-tokens", "8", *where, timeout_s=90)
    assert data["results"][0]["finish_reason"] == "length", data
    return "verify, top, doctor, keys, generate" + (" through the router" if run.router else "")


def contract(run: SGLangRun) -> str:
    """What skyctl asks of every engine, of the server of `right`."""
    place = run.places["right"]
    (url,) = place.servers.values()
    about = {
        "SKYCTL_TEST_SGLANG_URL": url,
        "SKYCTL_TEST_SGLANG_TOKEN": place.token,
        "SKYCTL_TEST_SGLANG_CHECKPOINTS": f"{run.b}:{run.a}",
    }
    tests = ["tests/integration/test_engine_contract.py", "-k", "sglang and not stub"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **about},
        capture_output=True,
        text=True,
        timeout=CONTRACT_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout.strip().splitlines()[-1]


def data_parallel(run: SGLangRun) -> str:
    """A server of two ranks, one on each GPU, gets `b` by disk, and `a` back."""
    if run.sender_gpu is None:
        pytest.skip("it needs a second GPU")
    fleet = run.fleets["twins"] = run._fleet("twins")
    by_disk = {"weight_transfer": {"transport": "disk"}, "gpus": available()[:2]}
    run._write("twins", run.a, replicas=1, data_parallel_size=2, **by_disk)
    began = time.monotonic()
    fleet.run("up", timeout_s=UP_TIMEOUT_S)
    took = time.monotonic() - began
    run.places["twins"] = Place.of(fleet)

    def answers() -> list[list[list[int]]]:
        """The ranks take turns, and there is an odd number of prompts: each answers each."""
        return [run.answers("twins")["twins-0"] for _ in range(2)]

    on_a, on_b = run.answers()["sgl-0"], run.answers("right")["right-0"]
    assert answers() == [on_a, on_a]
    freezes = []
    for path, right in ((run.b, on_b), (run.a, on_a)):
        job = fleet.data("sync-weights", str(path), timeout_s=90)["job"]
        freezes.append(1000 * job["result"]["freeze_window_s"])
        assert answers() == [right, right], path
    assert fleet.data("weights", "verify", timeout_s=90)["agree"] is True
    return f"up in {took:.0f} s, frozen {freezes[0]:.0f}, {freezes[1]:.0f} ms"


STEPS = (
    starts,
    a_b_a,
    by_nccl,
    many_pushes,
    pauses,
    pushes_under_held,
    sleeps,
    adapters,
    restarts,
    adapters_return,
    any_verbs,
    looks,
)
# what stubs have elsewhere is in the contract and in units; the rest is left out first
_FIRST = (starts, a_b_a, contract, pauses)
_LAST = (many_pushes, any_verbs, looks, data_parallel)
ON_GPUS = (*_FIRST, *(step for step in STEPS if step not in _FIRST + _LAST), *_LAST)


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread, wherever it is then."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(run: SGLangRun, out: Path, names: Collection[str] = ()) -> int:
    """Carry out the steps of these names, or all, and print what they came to; 1 when one failed.
    Logs go to `out`.
    """
    began, table = time.monotonic(), list[tuple[str, str, str]]()
    for step in ON_GPUS:
        if names and step is not starts and step.__name__ not in names:
            continue
        name, at = step.__name__, time.monotonic()
        if at - began > DEADLINE_S:
            table.append((name, "not begun", ""))
            continue
        try:
            with stopped_after(LIMIT_S - (at - began)):
                came_to, outcome = step(run), "ok"
        except pytest.skip.Exception as reason:
            came_to, outcome = str(reason), "skipped"
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1].line
            came_to, outcome = f"{type(error).__name__}: {str(error) or line}", "FAILED"
        print(f"{name}: {outcome} ({time.monotonic() - at:.0f} s) {came_to}", flush=True)
        table.append((name, outcome, " ".join(came_to.split())[:150]))
        if outcome == "FAILED":
            if step is starts:
                break
            with suppress(Exception), stopped_after(LIMIT_S - (time.monotonic() - began)):
                run.recover()
    with suppress(Exception), stopped_after(20):
        for fleet in run.fleets.values():
            logs = fleet.run("logs", "-n", "150", expect=None, timeout_s=20).stdout
            (out / f"{fleet.directory.name}.log").write_text(logs)
    print(f"\n{'step':<20}{'outcome':<11}figure")
    for row in table:
        print(f"{row[0]:<20}{row[1]:<11}{row[2]}", flush=True)
    run.down()
    return int(any(outcome not in ("ok", "skipped") for _, outcome, _ in table))


if __name__ == "__main__":
    routed = find_spec("vllm_router") is not None
    tried = SGLangRun(Path(sys.argv[1]), router=routed, sender_gpu=second_gpu())
    sys.exit(main(tried, Path(sys.argv[2]), sys.argv[3:]))
