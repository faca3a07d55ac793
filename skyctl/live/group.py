"""The group of a trainer's ranks and servers' workers, as rank 0 keeps it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl.live.offer import Offered
from skyctl.live.ranks import Body
from skyctl.wire.addresses import address_towards
from skyctl.wire.proofs import SECRET_BYTES

if TYPE_CHECKING:
    from skyctl.wire.group_store import GroupStore

_MEET_TIMEOUT_S = 60.0


class TrainerGroup:
    """The group of ranks and workers, as rank 0 has it: formed once, and again when a member of it
    has failed.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host
        """This machine's address for ranks of others; "" if there are none."""
        self.store: GroupStore | None = None
        """Where members find each other. Workers stay connected to it, and so notice our end."""
        self.stands = False
        """A push has gone through it."""
        self.wire: Body | None = None
        """Where they meet, as workers are told."""

    def meet(self, groups: Sequence[str], offered: Offered, transport: str) -> Body:
        """What ranks are told; a group of which a rank is no member is left."""
        from skyctl.wire.group_store import GroupStore
        from skyctl.wire.peer_group import Meeting

        if not (self.stands and self.wire and set(groups) == {self.wire["name"]}):
            self.drop()
            members, secret = len(groups) + len(offered.workers), secrets.token_bytes(SECRET_BYTES)
            address = self._host or address_towards(offered.machine or "127.0.0.1")
            self.store = GroupStore(address, secret, ranks=members - 1, timeout_s=_MEET_TIMEOUT_S)
            self.wire = Meeting(
                *(secrets.token_hex(8), transport, address, self.store.port, secret.hex()),
                *(members, _MEET_TIMEOUT_S, offered.update_timeout_s),
            ).to_wire()
        return {"meeting": self.wire, "workers": list(offered.workers)}

    def drop(self) -> None:
        """Members that wait for others in it learn that they do not come; workers leave it."""
        store, self.store, self.wire, self.stands = self.store, None, None, False
        if store is not None:
            store.close()
