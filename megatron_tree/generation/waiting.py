"""The order in which waiting requests are served."""

from __future__ import annotations

from collections import OrderedDict, deque

from .requests import ServedRequest


class Waiting:
    """Requests that wait: the lowest priority goes first. Among equals clients take turns, each in its own order."""

    def __init__(self):
        self._queues: dict[int, OrderedDict[str, deque[ServedRequest]]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for clients in self._queues.values() for queue in clients.values())

    @property
    def first(self) -> ServedRequest | None:
        """The one that is to be served next."""
        if not self._queues:
            return None
        return next(iter(self._queues[min(self._queues)].values()))[0]

    def take(self) -> ServedRequest:
        """Remove the first one: its client goes behind the others."""
        request = self.first
        self.remove(request)
        clients = self._queues.get(request.priority, ())
        if request.client in clients:
            clients.move_to_end(request.client)
        return request

    def add(self, request: ServedRequest) -> None:
        clients = self._queues.setdefault(request.priority, OrderedDict())
        clients.setdefault(request.client, deque()).append(request)

    def remove(self, request: ServedRequest) -> None:
        """A request waits no more, or did not."""
        clients = self._queues.get(request.priority, {})
        queue = clients.get(request.client, ())
        if request in queue:
            queue.remove(request)
            if not queue:
                del clients[request.client]
            if not clients:
                del self._queues[request.priority]

    def is_full_for(self, client: str, size: int) -> bool:
        """Whether a queue of this size is full for a client: one with less than its share of it is let in."""
        if len(self) < size:
            return False
        waiting = [(name, len(queue)) for clients in self._queues.values() for name, queue in clients.items()]
        waits = sum(count for name, count in waiting if name == client)
        return waits >= size // len({client, *(name for name, _ in waiting)})
