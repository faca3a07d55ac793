"""Work that a cancellation does not cut short."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from skyctl.children import started, to_its_end


class Waiting:
    """Somebody who waits for work that ends once it may `go_on`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.go_on, self.undoing, self.undone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.stops = 0
        self._error = error
        self.task = asyncio.create_task(to_its_end(self._work(), self._stop, self._undo))

    async def cancel(self, times: int) -> None:
        for number in range(times):
            await asyncio.sleep(0)
            self.task.cancel(f"number {number}")
        await asyncio.sleep(0.01)
        assert not self.task.done()

    async def _work(self) -> str:
        await self.go_on.wait()
        if self._error is not None:
            raise self._error
        return "done"

    def _stop(self) -> None:
        self.stops += 1

    async def _undo(self, result: str) -> None:
        assert result == "done"
        self.undoing.set()
        await asyncio.sleep(0.05)
        self.undone.set()


@pytest.mark.parametrize("error", [None, OSError("no room"), asyncio.CancelledError("the loop")])
async def test_who_is_not_cancelled_gets_what_came_of_it(error: BaseException | None) -> None:
    waiting = Waiting(error)
    waiting.go_on.set()
    if error is None:
        assert await waiting.task == "done"
    else:
        with pytest.raises(type(error), match=str(error)):
            await waiting.task
    assert waiting.stops == 0 and not waiting.undoing.is_set()


@pytest.mark.parametrize("times", [1, 3])
async def test_who_is_cancelled_is_so_once_what_came_of_it_is_undone(times: int) -> None:
    waiting = Waiting()
    await waiting.cancel(times)
    waiting.go_on.set()
    await waiting.undoing.wait()
    await waiting.cancel(times)
    with pytest.raises(asyncio.CancelledError):
        await waiting.task
    assert waiting.stops == times and waiting.undone.is_set()


async def test_of_work_that_fails_after_a_cancellation_nothing_is_undone() -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    waiting = Waiting(OSError("no room"))
    await waiting.cancel(2)
    waiting.go_on.set()
    with pytest.raises(asyncio.CancelledError, match="number 0") as caught:
        await waiting.task
    assert repr(caught.value.__cause__) == "OSError('no room')"
    assert complaints == [] and not waiting.undoing.is_set()


async def test_a_process_is_killed_also_if_its_start_is_cancelled_twice() -> None:
    go_on, process = asyncio.Event(), Mock()

    async def starting() -> Any:
        await go_on.wait()
        return process

    task = asyncio.create_task(started(starting()))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    process.kill.assert_called_once_with()
