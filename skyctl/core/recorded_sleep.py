"""What is on record of the servers' sleep, and what they say of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from skyctl import engines
from skyctl.core import actions
from skyctl.core.health import sleep_level
from skyctl.errors import ServerError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import fan_out
from skyctl.http.target import ServerTarget
from skyctl.states import label_matches
from skyctl.store.state import FleetState, ServerRow


async def rows_as_found(
    targets: Sequence[ServerTarget], client: ControlClient, state: FleetState
) -> dict[str, ServerRow]:
    """The recorded rows. A server that serves though it is on record as asleep is put on record as
    awake first: another fleet has woken it, or it was started again. Weights that a sleep discarded
    count as whole again only if the label has changed.
    """
    recorded, timeout_s = {row.name: row for row in state.servers()}, actions.READ_BACK_TIMEOUT_S
    rows = {target.name: recorded.get(target.name, ServerRow(target.name)) for target in targets}

    async def serves(target: ServerTarget) -> bool:
        server, row = engines.server(client, target, timeout_s=timeout_s), rows[target.name]
        if await server.is_paused() or await sleep_level(client, target, timeout_s):
            return False  # one that sleeps is paused as well
        if row.sleep_level == 1:
            return True
        return not label_matches(await server.weight_version(), row.weight_version)

    asleep = [target for target in targets if rows[target.name].sleep_level]
    outcomes = await fan_out(asleep, serves, timeout_s=3 * timeout_s)
    return rows | {
        outcome.server: state.update_server(outcome.server, sleep_level=0, weights_awake=False)
        for outcome in outcomes
        if outcome.value
    }


async def put_sleep_on_record(
    targets: Sequence[ServerTarget],
    rows: Mapping[str, ServerRow],
    unfit: Collection[str],
    client: ControlClient,
    state: FleetState,
    timeout_s: float,
) -> dict[str, ServerRow]:
    """The rows that differ from the record. A server that sleeps, or deeper than is on record, is
    put on record: the answer to its sleep may have been lost, or another program sent it. One whose
    weights were pushed while it slept reports, until the rest is awake, the sleep that discarded
    those before: it counts as deeper asleep only without a label on record, or under another one,
    or one that cannot be read. One of the `unfit`, which must not be thawed, is taken for awake if
    it does not report the sleep that is on record: the record of its wake may have been lost, and
    waking only the weights of a server that is awake thaws it.
    """

    async def ask(target: ServerTarget) -> tuple[int, bool]:
        level, row = await sleep_level(client, target, timeout_s) or 0, rows[target.name]
        deeper = level > row.sleep_level
        if deeper and row.weights_awake and row.weight_version:
            server = engines.server(client, target, timeout_s=timeout_s)
            with suppress(ServerError):
                deeper = not label_matches(await server.weight_version(), row.weight_version)
        return level, deeper

    outcomes = await fan_out(targets, ask, timeout_s=2 * timeout_s)
    asleep = {outcome.server: outcome.value for outcome in outcomes if outcome.value}
    awake = {name for name in unfit if name not in asleep or not asleep[name][0]}
    return {name: replace(rows[name], sleep_level=0) for name in awake} | {
        name: state.update_server(name, sleep_level=level, weights_awake=False)
        for name, (level, deeper) in asleep.items()
        if deeper
    }
