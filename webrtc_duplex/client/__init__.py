"""A caller in Python: `async with connect(url) as call`."""

from webrtc_duplex.client.call import Call, ReceivedEvent, ReceivedPacket, ReceivedSound, Route, connect

__all__ = ["Call", "ReceivedEvent", "ReceivedPacket", "ReceivedSound", "Route", "connect"]
