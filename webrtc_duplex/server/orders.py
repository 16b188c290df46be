"""What a client tells its call, by whatever way it came: taken at any time, acted on one after the other."""

import asyncio
from collections.abc import Awaitable, Callable

from webrtc_duplex.errors import DuplexError, RequestError
from webrtc_duplex.server.events import MESSAGES_PER_S, Command, Feed, Message, read_message
from webrtc_duplex.server.limits import Bucket

WAITING = 64
"""Messages that wait to be acted on; further ones are refused with an error event."""


class Orders:
    """Messages of one call's client. A bad one is answered by an `error` event, and ends nothing."""

    def __init__(self, feed: Feed, clock: Callable[[], float]) -> None:
        self._feed = feed
        self._clock = clock
        self._messages: asyncio.Queue[Message] = asyncio.Queue(WAITING)  # a further one is refused
        self._limit = Bucket(MESSAGES_PER_S, MESSAGES_PER_S, clock())

    def take(self, text: str | bytes) -> None:
        """Take a message, unless there are too many."""
        message = read_message(text)
        try:
            if not self._limit.take(self._clock()):
                raise asyncio.QueueFull
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            sentence = f"more than {MESSAGES_PER_S} messages a second are not acted on"
            self._feed.error(RequestError(sentence, code="rate_limit_exceeded"), message.event_id)

    async def obey(self, act: Callable[[Command], Awaitable[None]]) -> None:
        """Have each acted on, for ever."""
        while True:
            message = await self._messages.get()
            try:
                if isinstance(message.command, RequestError):
                    raise message.command
                await act(message.command)
            except DuplexError as error:
                self._feed.error(error, message.event_id)
