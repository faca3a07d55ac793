"""`skyctl top`: the fleet at work, live: a sample at every tick, and keys in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.fleet_calls import in_loop
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.errors import SkyctlError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from skyctl.cli.top_screen import Action
    from skyctl.core.registry import FleetRef
    from skyctl.core.service import Outcomes
    from skyctl.monitoring.sampler import Sampler
    from skyctl.monitoring.samples import FleetSample
    from skyctl.service import FleetService

_NO_LOG = ["nothing yet (skyctl has the logs of servers that it started itself)"]
_ESCAPES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
_NAMES = {"\x1b": "escape", "\r": "enter", "\n": "enter", "\x03": "ctrl-c"}


def top(
    file: FileOption = None,
    fleet: FleetOption = None,
    interval: Annotated[float, seconds("Between two samples.", least=0.2)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one sample (over one interval) and exit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch the fleet at work: tokens per second, load, memory, weights, the push in progress.

    Keys: up and down select a replica, p pauses and r resumes it (without a selection, the whole
    fleet), l follows its log, q quits. Without a terminal, and with --json, it prints one sample.

    \b
    Examples:
      skyctl top
      skyctl top --once --interval 5
      skyctl top --json | jq '[.data.replicas[].generation_tokens_per_s] | add'
    """
    from skyctl import output
    from skyctl.core.registry import select

    ref = select(file, fleet)
    if as_json or once or not output.can_fill_screen():
        from skyctl.cli.top_view import once_view

        sample = in_loop(_look_once(ref, interval))
        output.emit(sample.to_json(), once_view(sample))
        return
    with contextlib.suppress(KeyboardInterrupt):  # the usual way out of a live view
        in_loop(watch(ref, interval))


async def _look_once(ref: FleetRef, interval_s: float) -> FleetSample:
    from skyctl.core.status import Health
    from skyctl.monitoring.sampler import Sampler
    from skyctl.service import connect

    async with connect(ref) as running, Sampler(running, engine=ref.config.engine) as sampler:
        sample = await sampler.sample()
        if sample.status.health == Health.DOWN:
            return sample  # there are no rates to wait for
        await asyncio.sleep(interval_s)
        return await sampler.sample()


def parse_keys(text: str) -> list[str]:
    """The keys in one read: `p`, `up`, `down`, `escape`, `enter`, …"""
    keys = []
    position = 0
    while position < len(text):
        sequence = text[position : position + 3]
        if sequence in _ESCAPES:
            keys.append(_ESCAPES[sequence])
            position += 3
        elif text[position] == "\x1b" and text[position + 1 : position + 2] in ("[", "O"):
            position = _end_of_sequence(text, position)  # a key without a function here
        else:
            keys.append(_NAMES.get(text[position], text[position]))
            position += 1
    return keys


def _end_of_sequence(text: str, start: int) -> int:
    position = start + 2
    while position < len(text) and not ("@" <= text[position] <= "~"):
        position += 1
    return position + 1


class Keyboard:
    """Keys as they are pressed, while the block runs; the terminal is restored after it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._keys: asyncio.Queue[str] = asyncio.Queue()

    async def next(self, timeout_s: float | None = None) -> str | None:
        """The next key, or None if none came within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._keys.get()
        except TimeoutError:
            return None

    async def __aenter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)  # Ctrl-C still interrupts
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 64)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._keys.put_nowait("q")
            return
        for key in parse_keys(data.decode(errors="replace")):
            self._keys.put_nowait(key)


async def watch(ref: FleetRef, interval_s: float) -> None:
    """Show the fleet until `q` is pressed.

    Raises:
        SkyctlError: the first sample failed; later failures are shown on the screen.
    """
    from skyctl import output
    from skyctl.monitoring.sampler import Sampler
    from skyctl.service import connect

    async with connect(ref) as running, Sampler(running, engine=ref.config.engine) as sampler:
        top = LiveTop(ref, running, sampler, await sampler.sample())
        async with Keyboard() as keyboard:
            with output.fullscreen(top.render) as live:
                await top.run(keyboard, interval_s, live.refresh)


class LiveTop:
    """One running `top`: its latest sample, the screen's state, and the verb under way."""

    def __init__(
        self, ref: FleetRef, running: FleetService, sampler: Sampler, first: FleetSample
    ) -> None:
        from skyctl.cli.top_screen import TopScreen

        self._ref, self._running, self._sampler = ref, running, sampler
        self._sample = first
        self.screen = TopScreen()
        self.screen.see([replica.name for replica in first.replicas])
        self._verb: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # a verb is done: sample at once

    def render(self) -> RenderableType:
        """The screen as of now."""
        from skyctl import output
        from skyctl.cli.top_view import screen_view
        from skyctl.engines.logs import tail

        width, height = output.out.size
        log: list[str] = []
        if self.screen.log is not None:
            log = tail(self._ref.paths.log(self.screen.log), height) or _NO_LOG
        return screen_view(self._sample, self.screen, log, width, height)

    async def run(self, keyboard: Keyboard, interval_s: float, refresh: Callable[[], None]) -> None:
        """Sample every `interval_s` seconds and handle keys, until one of them ends it."""
        looking = asyncio.create_task(self._look(interval_s, refresh))
        try:
            while not looking.done():
                refresh()
                key = await keyboard.next(timeout_s=interval_s)
                action = None if key is None else self.screen.press(key)
                if action is not None and action.verb == "quit":
                    return
                if action is not None:
                    self._begin(action, refresh)
            await looking  # only its failure ends it
        finally:
            tasks = [task for task in (looking, self._verb) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, interval_s: float, refresh: Callable[[], None]) -> None:
        clock = asyncio.get_running_loop().time
        due = clock() + interval_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
            self._changed.clear()
            # a sample that took too long is not made up for
            due = max(due + interval_s, clock())
            try:
                self._sample = await self._sampler.sample()
                self.screen.see([replica.name for replica in self._sample.replicas])
            except SkyctlError as error:
                self.screen.message = error.message
            refresh()

    def _begin(self, action: Action, refresh: Callable[[], None]) -> None:
        if self._verb is not None and not self._verb.done():
            self.screen.message = "wait: the last one is not done yet"
            return
        self.screen.message = f"{action.verb} {action.server or self._ref.name} …"
        self._verb = asyncio.create_task(self._do(action, refresh))

    async def _do(self, action: Action, refresh: Callable[[], None]) -> None:
        from skyctl.core.service import Pause, Resume

        servers = () if action.server is None else (action.server,)
        try:
            if action.verb == "pause":
                asked = Pause(mode="keep", clear_cache=False, servers=servers)
                outcomes = await self._running.pause(asked)
            else:
                outcomes = await self._running.resume(Resume(servers=servers))
            self.screen.message = _summary(action.verb, outcomes)
        except SkyctlError as error:
            self.screen.message = error.message
        self._changed.set()
        refresh()


def _summary(verb: str, outcomes: Outcomes) -> str:
    """`paused 2 of 2 in 41 ms`, and why it failed where it did."""
    ok = sum(outcome.ok for outcome in outcomes)
    elapsed_ms = max((outcome.elapsed_ms for outcome in outcomes), default=0.0)
    said = f"{verb}d {ok} of {len(outcomes)} in {elapsed_ms:.0f} ms"
    others = [outcome for outcome in outcomes if not outcome.ok]
    return f"{said}; {others[0].server}: {others[0].detail}" if others else said
