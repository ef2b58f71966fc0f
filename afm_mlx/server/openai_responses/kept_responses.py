"""Responses that are kept in memory, so that a request can go on from one, or read it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from afm_mlx.server.conversation import Message
from afm_mlx.server.request_fields import InputItem


@dataclass(frozen=True)
class KeptResponse:
    """One response.

    Args:
        body: as it was sent.
        messages: the conversation that it ends, without the instructions of its request.
        items: the answer's, as requests send them, by their ids.
    """

    body: bytes
    messages: Sequence[Message]
    items: Mapping[str, InputItem] = field(default_factory=dict)


class KeptResponses:
    """The last responses of each client; what was not used for longest makes room.

    Args:
        per_client: responses of one client at most.
        max_bytes: of all responses and their conversations as JSON.
    """

    def __init__(self, per_client: int, max_bytes: int):
        self._per_client, self._max_bytes = per_client, max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[KeptResponse, int]] = OrderedDict()
        self._item_places: dict[tuple[str, str], str] = {}
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        """True if anything is kept at all."""
        return self._per_client > 0

    def keep(self, client: str, id: str, kept: KeptResponse) -> None:
        """Keep a response of a client."""
        size = len(kept.body) + len(msgspec.json.encode(kept.messages))
        self._kept[client, id] = kept, size
        self._item_places |= {(client, item): id for item in kept.items}
        self._bytes += size
        own = [key for key in self._kept if key[0] == client]
        for key in own[: max(0, len(own) - self._per_client)]:
            self._drop(key)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, client: str, id: str) -> KeptResponse | None:
        """A response of this client; None if there is none, or none any more."""
        if (client, id) not in self._kept:
            return None
        self._kept.move_to_end((client, id))
        return self._kept[client, id][0]

    def find_item(self, client: str, id: str) -> InputItem | None:
        """An item of a response of this client, as a request sends it; None if there is none."""
        found = self.get(client, self._item_places.get((client, id), ""))
        return None if found is None else found.items[id]

    def remove(self, client: str, id: str) -> bool:
        """Forget a response; whether there was one."""
        if (client, id) not in self._kept:
            return False
        self._drop((client, id))
        return True

    def _drop(self, key: tuple[str, str]) -> None:
        kept, size = self._kept.pop(key)
        self._bytes -= size
        for id in kept.items:
            self._item_places.pop((key[0], id), None)
