"""Connections that ask for nothing, kept from taking the places of those that do."""

import asyncio
import logging
import resource

from aiohttp import web

from webrtc_duplex.server.failures import Handler

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1


class Crowd:
    """At most so many connections in all: beyond that the oldest on which nothing is being answered are closed.

    Half of the descriptors that this process may open, by default; the other half is for calls. A caller's connection
    asks at once, so it is safe from then on, however many others were opened just to be there.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 if most is None else most
        self._asking: set[web.RequestHandler] = set()

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Know of a request for as long as it is being answered."""
        self._asking.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._asking.discard(request.protocol)

    async def keep(self, server: web.Server) -> None:
        """Look after the server's connections, for ever."""
        crowded = False
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            surplus = len(server.connections) - self._most
            if surplus > 0:
                self._close_idle(server, surplus)
                if not crowded:
                    log.warning("over %d connections: the oldest that ask for nothing are closed", self._most)
            crowded = surplus > 0

    def _close_idle(self, server: web.Server, count: int) -> None:
        """Close so many, the oldest first; fewer if all the others are being answered."""
        idle = [connection for connection in server.connections if connection not in self._asking]
        for connection in idle[:count]:
            connection.force_close()
