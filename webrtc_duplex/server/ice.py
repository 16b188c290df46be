"""STUN and TURN servers as callers are told of them, with credentials that expire."""

import base64
import hashlib
import hmac

from webrtc_duplex.server.realtime import Json
from webrtc_duplex.settings import IceSettings


class IceServers:
    """The servers of the settings; credentials are those of the TURN REST convention, which coturn checks.

    A user name is `<time it expires>:<whose>`, its password the SHA-1 HMAC of it under the secret shared with TURN.
    """

    def __init__(self, settings: IceSettings) -> None:
        self._settings = settings

    def as_json(self, whose: str, now: float) -> list[Json]:
        """`iceServers` of an `RTCConfiguration`."""
        servers: list[Json] = []
        if self._settings.stun_urls:
            servers.append({"urls": list(self._settings.stun_urls)})
        if self._settings.turn_urls:
            name, password = self._credentials(whose, now)
            servers.append({"urls": list(self._settings.turn_urls), "username": name, "credential": password})
        return servers

    def as_links(self, whose: str, now: float) -> list[str]:
        """Values of `Link` headers, as WHIP has them (RFC 9725, 4.4)."""
        links = [f'<{url}>; rel="ice-server"' for url in self._settings.stun_urls]
        if self._settings.turn_urls:
            name, password = self._credentials(whose, now)
            shown = f'username="{name}"; credential="{password}"; credential-type="password"'
            links += [f'<{url}>; rel="ice-server"; {shown}' for url in self._settings.turn_urls]
        return links

    @property
    def ttl_s(self) -> int:
        return round(self._settings.turn_ttl_s)

    def _credentials(self, whose: str, now: float) -> tuple[str, str]:
        name = f"{round(now) + self.ttl_s}:{whose}"
        mac = hmac.digest((self._settings.turn_secret or "").encode(), name.encode(), hashlib.sha1)
        return name, base64.b64encode(mac).decode()
