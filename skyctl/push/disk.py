"""Pushes in which every server reads the checkpoint itself: no sender, no chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.engines.base import Refusal
from skyctl.errors import PreflightError, ServerError
from skyctl.push.request import PushFleet
from skyctl.push.sites import Site, Weights, alive, each

_SLOWEST_BYTES_PER_S = 50e6  # a cold network disk; below it, raise update_timeout_s


class DiskDelivery:
    """One call per server."""

    frees_late = False
    copies = False
    can_retry = False  # no call scrubs a reload that broke off

    def __init__(self, checkpoint: Checkpoint, fleet: PushFleet) -> None:
        self._checkpoint = checkpoint
        self._control_timeout_s = fleet.control_timeout_s
        self._timeout_s = fleet.update_timeout_s + checkpoint.total_bytes / _SLOWEST_BYTES_PER_S

    @property
    def content_digest(self) -> str:
        return ""

    @property
    def content(self) -> None:
        return None

    async def open(self, sites: Sequence[Site]) -> None:
        self._check_unchanged()

    async def init(self, sites: Sequence[Site]) -> None: ...

    async def start(self, sites: Sequence[Site], *, scrubbing: bool = False) -> None:
        await each(
            alive(sites),
            lambda site: site.vllm.prepare_reload(),
            timeout_s=self._control_timeout_s,
            what="start",
        )

    async def update(self, sites: Sequence[Site], on_progress: Callable[[int], None]) -> None:
        path = str(self._checkpoint.path)

        async def call(site: Site) -> None:
            site.weights = Weights.UNKNOWN
            try:
                with site.spans.loading():
                    await site.vllm.reload_weights(path, timeout_s=self._timeout_s)
            except ServerError as error:
                if error.refusal != Refusal.CANNOT_RELOAD:
                    raise
                site.weights = Weights.OLD
                raise ServerError(f"{error.message}, or push with another transport") from error

        await each(alive(sites), call, timeout_s=self._timeout_s, what="reload")
        try:
            self._check_unchanged()
        except PreflightError as error:
            for site in alive(sites):
                site.failure = error.message
        on_progress(self._checkpoint.total_bytes)

    async def finish(self, sites: Sequence[Site], version: Callable[[], str]) -> None:
        for site in alive(sites):
            site.weights = Weights.NEW

    async def close(self) -> None: ...

    def _check_unchanged(self) -> None:
        """Servers read by name: the files must be the ones that were checked, before and after."""
        now = read_checkpoint(str(self._checkpoint.path))
        if now.identity_digest != self._checkpoint.identity_digest:
            raise PreflightError(f"{self._checkpoint.path} changed during the push")
