"""An asyncio event loop without I/O: when nothing is ready, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any, NoReturn

PROCESS: ContextVar[Any] = ContextVar("process", default=None)
"""The simulated process that runs; tasks and callbacks inherit it with their context."""


class Killed(BaseException):
    """Raised inside a process that dies amid synchronous code: every seam raises it again."""


STEPS = 500_000
"""A schedule takes some thousands; one that takes so many never ends."""


class Endless(BaseException):
    """Raised by `run_until` after so many steps."""


class Handle:
    """A callback, skipped when its process is dead by the time it is due."""

    __slots__ = ("args", "callback", "context", "off", "process")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.process = context.get(PROCESS)
        self.off = False

    def cancel(self) -> None:
        self.off = True

    def cancelled(self) -> bool:
        return self.off


class Task(asyncio.Task):  # type: ignore[type-arg]
    """Its hash is its number: sets of tasks are iterated alike in every run."""

    def __init__(self, coro: Any, number: int, **options: Any) -> None:
        self.number = number  # first: asyncio puts it into a set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.AbstractEventLoop):
    """`now` is in seconds. `delay` says how long a call in another thread takes."""

    def __init__(self, delay: Callable[[], float]) -> None:
        self.now = 0.0
        self.steps = 0
        self.problems: list[BaseException] = []
        self._delay = delay
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = 0
        self._running = False

    # --- what asyncio asks for ------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    get_debug = bool  # each future asks: the cheapest that answers False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tasks of dead processes are destroyed while pending, and nobody hears their errors."""

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        handle = Handle(callback, args, context if context is not None else copy_context())
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        handle = Handle(callback, args, context if context is not None else copy_context())
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        self._numbers += 1
        task = Task(coro, self._numbers, loop=self, name=name, context=context)
        process = context.get(PROCESS) if context else PROCESS.get()
        if process is not None:
            process.tasks.append(task)  # never collected before the schedule ends
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Runs at one instant, after a delay."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except (Killed, KeyboardInterrupt):
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._delay(), run)
        return future

    def add_signal_handler(self, number: int, callback: Any, *args: Any) -> None:
        """Nobody sends signals here."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the simulated loop has no {name}")

    # --- running --------------------------------------------------------------------------------

    def run_until(self, when: float, done: Callable[[], bool] = lambda: False) -> None:
        """Run everything that is due up to `when`, or until `done()`, asked between instants."""
        events._set_running_loop(self)
        self._running = True
        ready, timers = self._ready, self._timers
        try:
            while True:
                while ready:
                    handle = ready.popleft()
                    process = handle.process
                    if handle.off or (process is not None and process.dead):
                        continue
                    if process is not None and process.stopped:
                        process.parked.append(handle)
                        continue
                    self.steps += 1
                    if self.steps > STEPS:
                        raise Endless
                    try:
                        handle.context.run(handle.callback, *handle.args)
                    except Killed:
                        pass
                    except BaseException as error:  # ours: the product's are kept in its tasks
                        self.problems.append(error)
                        raise
                if done():
                    return
                while timers and timers[0][2].off:
                    heapq.heappop(timers)
                if not timers or timers[0][0] > when:
                    self.now = max(self.now, when)
                    return
                now = self.now = max(self.now, timers[0][0])
                while timers and timers[0][0] <= now:
                    ready.append(heapq.heappop(timers)[2])
        finally:
            self._running = False
            events._set_running_loop(None)

    def run_again(self, handles: Sequence[Handle]) -> None:
        """Run what a process was to do while it was stopped."""
        self._ready.extend(handles)

    def forget(self) -> None:
        """Forget what is due."""
        self._ready.clear()
        self._timers.clear()
