"""The servers of an attached fleet: where they are now, and which record is whose."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyctl.core.observation import Observed, observe
from skyctl.core.registry import FleetRef
from skyctl.core.urls import access, api_key, control_token
from skyctl.errors import SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.service.discovery import locate
from skyctl.store.in_doubt import InDoubt, in_doubt, put_in_doubt
from skyctl.store.journal import number_of
from skyctl.store.server_names import (
    Located,
    Naming,
    name_servers,
    normalized,
    record_names,
)
from skyctl.store.state import FleetState, ServerRow


@dataclass(frozen=True)
class Suspect:
    """A server that may be one in doubt under another URL."""

    record: InDoubt
    """What it has to be repaired of; it is never thawed for having been found frozen."""
    reason: str
    """Why it is quarantined."""


def _frozen_state(seen: Observed) -> str:
    """How a server was found, "" if it serves."""
    if not seen.engine:
        return "without an answer"
    if seen.sleep_level:
        return "asleep"
    return "paused" if seen.paused else ""


class AttachedServers:
    """Names are those that servers have from now on, also before `adopt` has recorded them. That
    needs the fleet's turn: other commands act on servers by the names on record.
    """

    def __init__(self, ref: FleetRef, client: ControlClient, state: FleetState) -> None:
        self.not_found = ""
        """Why the servers could not be located, if those that skyctl froze stand for them."""
        self.targets: tuple[ServerTarget, ...] = ()
        """The servers as they were last located."""
        self._ref = ref
        self._client = client
        self._state = state
        keys = access(ref.config, ref.paths)
        self._token, self._key = control_token(keys), api_key(keys)
        self._located: tuple[Located, ...] = ()
        self._located_at = 0.0
        self._naming = Naming()
        self._recorded: list[ServerRow] = []

    async def locate(
        self, *, within_s: float = 0.0, or_frozen: bool = False
    ) -> tuple[ServerTarget, ...]:
        """The servers as they are now, or were within `within_s` seconds. Raises as `locate`; with
        `or_frozen`, only where no server is known to be frozen: else those are taken.
        """
        now = asyncio.get_running_loop().time()
        if not self._located or self.not_found or now - self._located_at >= within_s:
            self.not_found = ""
            try:
                self._located = await locate(self._ref)
            except SkyctlError as error:
                frozen = self._frozen() if or_frozen else ()
                if not frozen:
                    raise
                self._located, self.not_found = frozen, error.message
            self._located_at = now
        self.read_names()
        return self.targets

    async def adopt(self, *, alone: bool) -> bool:
        """Record the names, and quarantine suspects. False, and nothing is recorded, if a recorded
        server gets another name: for that this process must act `alone`.
        """
        if self.not_found:
            return True  # each is where its record says
        suspects = await self.suspects()
        if self._recorded_already() and not suspects:
            return True
        with self._state.transaction():
            self.read_names()  # another command may have recorded names meanwhile
            if self._naming.renamed and not alone:
                return False
            record_names(self._state, self._naming)
            for target in self.targets:
                if suspect := suspects.get(target.url):
                    self._state.update_server(target.name, quarantine=suspect.reason)
                    put_in_doubt(
                        self._state, {target.name: replace(suspect.record, server=target.name)}
                    )
            self.read_names()
        return True

    async def suspects(self, observed: Sequence[Observed] | None = None) -> dict[str, Suspect]:
        """Servers that may be one in doubt under another URL (a different spelling, a tunnel, a new
        address), by URL: they have appeared since then, and do not serve.
        """
        before = {row.url for row in self._recorded if row.located}
        new = [target for target in self.targets if normalized(target.url) not in before]
        doubts = self.in_doubt() if new else {}
        doubts = {name: record for name, record in doubts.items() if not record.by_verb}
        new = [target for target in new if target.name not in doubts]
        if not new or not doubts:
            return {}
        present = {target.name for target in self.targets}
        likely = max(
            doubts.values(),
            key=lambda record: (
                record.server not in present,
                record.half_updated,
                number_of(record.job),
            ),
        )
        at = self.rows()[likely.server].url or "an unknown URL"
        if observed is None:
            observed = await observe(self._client, new)
        states = {seen.server: _frozen_state(seen) for seen in observed}
        return {
            target.url: Suspect(
                replace(likely, half_updated=True, thaw=False, woken=False, digest="", version=""),
                f"found {state}, and may be {likely.server} ({at}) by another URL: {likely.reason}",
            )
            for target in new
            if (state := states[target.name])
        }

    def read_names(self) -> None:
        """Name the servers that were located, by what is recorded now."""
        self._recorded = self._state.servers()
        recorded = {row.name: row.url for row in self._recorded}
        self._naming = name_servers(self._ref.name, self._located, recorded)
        engine = self._ref.config.engine
        # a control token is that of a guard, which knows whose freeze it is
        guarded = self._ref.config.control_token_env is not None
        holder = self._state.holder if guarded else ""
        self.targets = tuple(
            ServerTarget(name, url, self._token, engine, self._key, holder)
            for name, url in self._naming.servers
        )

    def rows(self) -> dict[str, ServerRow]:
        """The intended state of every server, recorded or located, by name."""
        rows = {self._naming.now(row.name): row for row in self._recorded}
        names = dict.fromkeys([*rows, *(target.name for target in self.targets)])
        return {name: replace(rows.get(name, ServerRow(name)), name=name) for name in names}

    def in_doubt(self) -> dict[str, InDoubt]:
        """Every server in doubt, located or not, by name."""
        doubts = in_doubt(self._state).values()
        renamed = (replace(record, server=self._naming.now(record.server)) for record in doubts)
        return {record.server: record for record in renamed}

    def forget_gone(self) -> None:
        """Forget discovered servers that are gone, if nothing need be remembered of them."""
        if isinstance(self._ref.config.servers, list):
            return
        present, doubted = {target.name for target in self.targets}, self.in_doubt()
        for name, row in self.rows().items():
            needed = row.paused or row.sleep_level or row.quarantine or name in doubted
            if name not in present and not needed:
                self._state.forget_server(name)

    def _frozen(self) -> tuple[Located, ...]:
        """The discovered servers that skyctl paused, or put to sleep, where they were then."""
        return tuple(
            (row.name, row.url)
            for row in self._state.servers()
            if row.url and (row.paused or row.sleep_level)
        )

    def _recorded_already(self) -> bool:
        urls = {name: normalized(url) for name, url in self._naming.servers}
        return {row.name: row.url for row in self._recorded if row.located} == urls
