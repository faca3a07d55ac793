"""docs/mistakes.md, and mistakes.md beside this file: each mistake is made with the real command,
and shows what the page says.

The pages hold what is shown (message, hint, exit code); here stands the situation that each mistake
is made in. Quotes in the page stand for the backticks that Markdown has no room for.
"""

from __future__ import annotations

import http.server
import os
import re
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyctl.core.arbiter import LOCK
from skyctl.store.paths import fleet_paths
from skyctl.store.state import FleetState
from tests.faults.stub_fleet import StubFleet
from tests.unit.push.checkpoints import CONFIG, tiny_tensors, write_checkpoint

PAGES = (
    Path(__file__).parents[2] / "docs" / "mistakes.md",
    Path(__file__).with_name("mistakes.md"),
)
AT_LEAST = 20
NO_VLLM = "#!/bin/sh\necho vllm\n"
KNOWS_ITS_ARGUMENTS = """#!/bin/sh
case "$3" in
*_version.py*) echo installed ;;
*make_arg_parser*) echo '{"max-model-len": ["", null, "", ""], "seed": ["", null, "", ""]}' ;;
esac
"""
NO_GPU = "#!/bin/sh\nexit 9\n"
Situation = Callable[[StubFleet], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mistake:
    """One row of the page."""

    name: str
    typed: str
    shown: tuple[str, ...]
    code: int


def mistakes() -> list[Mistake]:
    found = []
    for line in (line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()):
        if not line.startswith("| ") or line.startswith("| mistake "):
            continue
        made, shown, code, _ = (cell.strip() for cell in line.strip("|").split(" | "))
        name, typed = re.fullmatch(r"(.+): `skyctl (.+)`", made).groups()  # type: ignore[union-attr]
        found.append(Mistake(name, typed, tuple(re.findall(r"`([^`]+)`", shown)), int(code)))
    return found


MISTAKES = mistakes()


def matches(wanted: str, line: str) -> bool:
    """Runs of blanks count as one, backticks as quotes, and `…` matches anything."""
    parts = (re.escape(" ".join(part.split())) for part in wanted.split("…"))
    squeezed = " ".join(line.replace("`", "'").split())
    return re.fullmatch(r"\s*.*\s*".join(parts), squeezed) is not None


def make(mistake: Mistake, fleet: StubFleet) -> None:
    """Type it, and compare."""
    process = fleet.start(*shlex.split(mistake.typed))
    stdout, stderr = process.communicate(timeout=60)
    lines = (stderr + stdout).splitlines()
    shown = "\n".join(lines)
    assert process.returncode == mistake.code, shown
    for wanted in mistake.shown:
        assert any(matches(wanted, line) for line in lines), f"{wanted}\n--- shown:\n{shown}"
    told = [line.partition(": ")[0] for line in lines if line.startswith(("error: ", "hint: "))]
    assert told == (["error", "hint"] if mistake.code else []), shown


# without a fleet


@contextmanager
def nothing(fleet: StubFleet) -> Iterator[None]:
    """An empty directory."""
    yield


def a_file(text: str) -> Situation:
    @contextmanager
    def situation(fleet: StubFleet) -> Iterator[None]:
        fleet.write()
        (fleet.directory / "fleet.yaml").write_text(text)
        yield

    return situation


@contextmanager
def a_taken_port(fleet: StubFleet) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        fleet.write(name="demo", replicas=1, extra=f"ports: [{holder.getsockname()[1]}]")
        yield


@contextmanager
def no_vllm(fleet: StubFleet) -> Iterator[None]:
    fleet.write(name="demo")
    (fleet.directory / "python").write_text(NO_VLLM)
    yield


@contextmanager
def a_vllm_that_says_its_arguments(fleet: StubFleet) -> Iterator[None]:
    fleet.write(name="demo")
    (fleet.directory / "python").write_text(KNOWS_ITS_ARGUMENTS)
    text = "name: demo\nmodel: ./model\npython: ./python\ndevice: cpu\nargs: {max-modle-len: 8}\n"
    (fleet.directory / "fleet.yaml").write_text(text)
    yield


@contextmanager
def no_gpu(fleet: StubFleet) -> Iterator[None]:
    fleet.write(name="demo")
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text().replace("device: cpu", "device: cuda"))
    command = fleet.directory / "nvidia-smi"
    command.write_text(NO_GPU)
    command.chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{fleet.directory}:{path}"
    try:
        yield
    finally:
        os.environ["PATH"] = path


@contextmanager
def a_fleet_that_is_down(fleet: StubFleet) -> Iterator[None]:
    fleet.write(name="demo")
    yield


class _OnlyInference(http.server.BaseHTTPRequestHandler):
    """What a vLLM server without its development mode answers to a control call."""

    def do_GET(self) -> None:
        body = b'{"detail":"Not Found"}'
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def servers_without_dev_mode(fleet: StubFleet) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OnlyInference) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        (fleet.directory / "fleet.yaml").write_text(f"name: far\nservers: ['{url}']\n")
        yield
        server.shutdown()


ALONE: dict[str, Situation] = {
    "no fleet file here": nothing,
    "an unknown fleet name": nothing,
    "another tool's word": nothing,
    "another tool's word for the end": nothing,
    "servers that run already": nothing,
    "a misspelled option": nothing,
    "a key of the fleet file as an option": nothing,
    "the fleet's name as an argument": nothing,
    "following with -f": nothing,
    "a prompt without quotes": nothing,
    "an unknown pause mode": nothing,
    "an unclosed list": a_file("name: demo\nmodel: ./model\nreplicas: [\n"),
    "an unknown key": a_file("name: demo\nmodel: ./model\nreplica: 2\n"),
    "a file of another tool": a_file("services: {vllm: {image: vllm/vllm-openai}}\n"),
    "a misspelled vLLM argument": a_vllm_that_says_its_arguments,
    "an unknown device": a_file("name: demo\nmodel: ./model\n\ndevice: gpu\n"),
    "no GPU in the machine": no_gpu,
    "a missing model": a_file("name: demo\nmodel: ./nope\npython: ./python\n"),
    "vLLM is not installed": no_vllm,
    "a port that is taken": a_taken_port,
    "a fleet that is not running": a_fleet_that_is_down,
    "the router's port as a server": servers_without_dev_mode,
    "down twice": a_fleet_that_is_down,
}


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m.name in ALONE], ids=lambda m: m.name)
def test_a_mistake_without_a_fleet_gets_advice(mistake: Mistake, tmp_path: Path) -> None:
    fleet = StubFleet(tmp_path)
    with ALONE[mistake.name](fleet):
        make(mistake, fleet)


# with a fleet that is up


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubFleet]:
    """Two replicas that serve `model`, and checkpoints beside it."""
    fleet = StubFleet(tmp_path_factory.mktemp("demo"))
    fleet.write(name="demo")
    here = fleet.directory
    write_checkpoint(here / "model", tiny_tensors(1))
    for name in ("next", "runs/step-1"):
        write_checkpoint(here / name, tiny_tensors(2))
    (here / "lora").mkdir()
    (here / "lora" / "adapter_config.json").write_text("{}")
    write_checkpoint(here / "wide", tiny_tensors(2), config={**CONFIG, "num_hidden_layers": 9})
    fleet.run("up")
    yield fleet
    fleet.run("down", "--drain-timeout", "0")


@contextmanager
def as_it_is(fleet: StubFleet) -> Iterator[None]:
    yield


@contextmanager
def asleep(fleet: StubFleet) -> Iterator[None]:
    fleet.run("sleep")
    yield
    fleet.run("wake")


@contextmanager
def a_label_in_use(fleet: StubFleet) -> Iterator[None]:
    fleet.run("sync-weights", "model", "--weight-version", "base-2")
    yield


@contextmanager
def a_push_that_waits(fleet: StubFleet) -> Iterator[None]:
    """The lock of a push that takes its time, held by this process."""
    paths = fleet_paths("demo", {"SKYCTL_HOME": str(fleet.directory / "home")})
    with FleetState(paths.database) as state:
        lock = state.locks.take(LOCK, "push-99")
        yield
        lock.release()


UP: dict[str, Situation] = {
    "up twice": as_it_is,
    "an unknown server": as_it_is,
    "a server as an option": as_it_is,
    "resume a fleet that is not paused": as_it_is,
    "wake a fleet that is not asleep": as_it_is,
    "a missing checkpoint": as_it_is,
    "a hub model as a checkpoint": as_it_is,
    "a file as a checkpoint": as_it_is,
    "the directory above the checkpoints": as_it_is,
    "an adapter as a checkpoint": as_it_is,
    "a checkpoint of another shape": as_it_is,
    "a transport for GPUs on a CPU": as_it_is,
    "a label that is already used for other weights": a_label_in_use,
    "a push while another runs": a_push_that_waits,
    "a push to sleeping servers": asleep,
    "resume a sleeping fleet": asleep,
    "generate while nothing is routed": asleep,
    "an unknown job": as_it_is,
}
COPIED = (
    "a copy of a fleet file whose fleet is up",
    "a verb in the directory of such a copy",
)


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m.name in UP], ids=lambda m: m.name)
def test_a_mistake_with_a_running_fleet_gets_advice(mistake: Mistake, demo: StubFleet) -> None:
    with UP[mistake.name](demo):
        make(mistake, demo)


def test_a_copied_fleet_file_acts_on_nobodys_fleet(demo: StubFleet) -> None:
    before = demo.replicas()
    copy = demo.directory / "copy"
    copy.mkdir()
    (copy / "fleet.yaml").write_text((demo.directory / "fleet.yaml").read_text())
    for mistake in (m for m in MISTAKES if m.name in COPIED):
        make(mistake, StubFleet(copy, home=demo.directory / "home"))
    shown = [{k: row[k] for k in ("pid", "state")} for row in demo.replicas().values()]
    assert shown == [{k: row[k] for k in ("pid", "state")} for row in before.values()]


def test_a_moved_fleet_file_goes_on_with_its_fleet(demo: StubFleet, tmp_path: Path) -> None:
    file, moved = demo.directory / "fleet.yaml", demo.directory / "moved.yaml"
    file.rename(moved)
    try:
        assert "nothing to do" in demo.run("up", "-f", str(moved)).stderr
    finally:
        moved.rename(file)
        demo.run("up")


def test_page_and_test_know_the_same_mistakes() -> None:
    assert sorted(m.name for m in MISTAKES) == sorted([*ALONE, *UP, *COPIED])
    assert len(MISTAKES) >= AT_LEAST
