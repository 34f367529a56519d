"""The order in which waiting requests are served."""

from __future__ import annotations

from collections import OrderedDict, deque

from .requests import ServedRequest


class Waiting:
    """Requests that wait: the lowest priority goes first. Among equals clients take turns, each in its own order."""

    def __init__(self):
        self._queues: dict[int, OrderedDict[str, deque[ServedRequest]]] = {}

    def __len__(self) -> int:
        return sum(len(own) for clients in self._queues.values() for own in clients.values())

    @property
    def first(self) -> ServedRequest | None:
        """The one that is to be served next."""
        if not self._queues:
            return None
        return next(iter(self._queues[min(self._queues)].values()))[0]

    def take(self) -> ServedRequest:
        """Remove the first one: its client goes behind the others."""
        serving = self.first
        self.remove(serving)
        clients = self._queues.get(serving.priority, ())
        if serving.client in clients:
            clients.move_to_end(serving.client)
        return serving

    def add(self, serving: ServedRequest) -> None:
        """A request begins to wait."""
        clients = self._queues.setdefault(serving.priority, OrderedDict())
        clients.setdefault(serving.client, deque()).append(serving)

    def remove(self, serving: ServedRequest) -> None:
        """A request waits no more, or did not."""
        clients = self._queues.get(serving.priority, {})
        own = clients.get(serving.client, ())
        if serving in own:
            own.remove(serving)
            if not own:
                del clients[serving.client]
            if not clients:
                del self._queues[serving.priority]

    def is_full_for(self, client: str, size: int) -> bool:
        """Whether a queue of this size is full for a client: one with less than its share of it is let in."""
        if len(self) < size:
            return False
        waiting = [(name, len(own)) for clients in self._queues.values() for name, own in clients.items()]
        own = sum(count for name, count in waiting if name == client)
        return own >= size // len({client, *(name for name, _ in waiting)})
