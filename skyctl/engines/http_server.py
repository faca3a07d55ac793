"""What the control routes of all engines share: a deadline, and checks of an answer's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from skyctl.engines.base import Refusal
from skyctl.engines.inside.guard import FROZEN_BY_ANOTHER
from skyctl.errors import ServerError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget

Read = TypeVar("Read")


@contextmanager
def ignoring_status(*statuses: int) -> Iterator[None]:
    """End the block where a server answers one of these HTTP statuses, any error's if none is
    named. Errors without a status, such as a passed deadline, are raised.
    """
    try:
        yield
    except ServerError as error:
        if not error.status or (statuses and error.status not in statuses):
            raise


class HttpServer:
    """One server. `timeout_s` is the deadline of each call that gives none of its own."""

    def __init__(
        self, client: ControlClient, target: ServerTarget, timeout_s: float = 30.0
    ) -> None:
        self.target = target
        self._client = client
        self._timeout_s = timeout_s
        self.known_ranks: tuple[int, int] | None = None

    async def models(self) -> list[str]:
        data = await self._field("GET", "/v1/models", "data")
        return self._understood("/v1/models", lambda: [str(model["id"]) for model in data])

    async def longest_context(self) -> int | None:
        """`max_model_len` of the first model; None if it lists none."""
        data = await self._field("GET", "/v1/models", "data")
        lengths = self._understood(
            "/v1/models", lambda: [int(model.get("max_model_len") or 0) for model in data[:1]]
        )
        return next(iter(lengths), 0) or None

    async def complete(
        self, body: Mapping[str, Any], *, chat: bool = False, timeout_s: float | None = None
    ) -> Any:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return await self._call("POST", path, json=dict(body), timeout_s=timeout_s)

    def _target_at(self, path: str) -> ServerTarget:
        """The server, with the key that this route requires."""
        return self.target

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        how: dict[str, Any] = {"params": params, "json": json, "timeout_s": timeout_s}
        try:
            return await self._client.call(self._target_at(path), method, path, **how)
        except ServerError as error:
            if error.status == 409 and FROZEN_BY_ANOTHER in error.message:
                error.refusal = Refusal.FROZEN_BY_ANOTHER
            raise

    async def _text(self, method: str, path: str, **how: Any) -> str:
        """A call whose answer is not JSON."""
        target, timeout_s = self._target_at(path), self._timeout_s
        return await self._client.text(target, path, method=method, timeout_s=timeout_s, **how)

    async def _object(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        """A call whose answer is a JSON object."""
        return self._mapping(await self._call(method, path, **how), path)

    async def _field(self, method: str, path: str, key: str, **how: Any) -> Any:
        answer = await self._object(method, path, **how)
        if key not in answer:
            raise ServerError(f"{self.target.name}: {self.target.url}{path} did not say {key!r}")
        return answer[key]

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
