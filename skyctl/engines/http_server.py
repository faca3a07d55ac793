"""What the control routes of all engines share: a deadline, and checks of an answer's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from skyctl.errors import ServerError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget

Read = TypeVar("Read")


class HttpServer:
    """One server. `timeout_s` is the deadline of each call that gives none of its own."""

    def __init__(
        self, client: ControlClient, target: ServerTarget, timeout_s: float = 30.0
    ) -> None:
        self.target = target
        self._client = client
        self._timeout_s = timeout_s
        self.known_ranks: tuple[int, int] | None = None

    def _understood(self, path: str, read: Callable[[], Read]) -> Read:
        """The result of `read` on an answer; ServerError if the answer has another shape."""
        try:
            return read()
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise ServerError(
                f"{self.target.name}: {self.target.url}{path} answered something else: {error!r}"
            ) from error

    def _mapping(self, answer: Any, path: str) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise ServerError(
                f"{self.target.name}: {self.target.url}{path} answered {answer!r:.100}, "
                "not a JSON object"
            )
        return answer
