"""What a call is watched for: troubles its client should know of, and the limits of its time."""

from collections.abc import Callable

from webrtc_duplex.messages import Stepped
from webrtc_duplex.server.events import Feed
from webrtc_duplex.settings import ServerSettings

INPUT_SILENT_S = 15.0
LATE_S = 0.04
"""A step that begins so late is warned of: half a frame."""
DRIFT_PPM = 300.0
"""Sound cards are within 100 or so of each other. At this a packet is too much, or missing, every minute."""
FAREWELL_S = 30.0
"""So long before its longest duration a call is told of its end; or half of that duration, if it is shorter."""
IDLE_WARNING_S = 10.0
"""So long before it is ended for its silence; or half of what it may be silent for."""


class Vigil:
    """Looks after one call, once a second, from when it has a row: a wait in line is none of its time."""

    def __init__(self, feed: Feed, settings: ServerSettings, clock: Callable[[], float]) -> None:
        self._feed = feed
        self._settings = settings
        self._clock = clock
        self._began_at = self._voice_at = self._user_voice_at = clock()
        self._told = set[str]()

    @property
    def age_s(self) -> float:
        return self._clock() - self._began_at

    @property
    def left_s(self) -> float | None:
        """How long the call may still last, once it is time to say so."""
        longest_s = self._settings.max_duration_s
        if longest_s is None or self.age_s < longest_s - min(FAREWELL_S, longest_s / 2):
            return None
        return max(0.0, longest_s - self.age_s)

    @property
    def over_because(self) -> str | None:
        """Why the call must end now."""
        longest_s, idle_s = self._settings.max_duration_s, self._settings.idle_timeout_s
        if longest_s is not None and self.age_s > longest_s:
            return "max_duration"
        if idle_s is not None and self._clock() - self._voice_at > idle_s:
            return "idle_timeout"
        return None

    def voices(self, user: bool, agent: bool, live: bool) -> None:
        """Who speaks now; a call that is not live does not miss its user."""
        now = self._clock()
        if user or not live:
            self._user_voice_at = now
        if user or agent:
            self._voice_at = now

    def warn(self, step: Stepped | None, echo: bool, drift_ppm: float | None) -> None:
        """Tell of what has begun to go wrong; of each thing again only after it had stopped."""
        signs = {
            "clock_drift": drift_ppm is not None and abs(drift_ppm) > DRIFT_PPM,
            "echo_suspected": echo,
            "gpu_late": step is not None and (step.late_s > LATE_S or step.skipped > 0),
            "idle_timeout": self._is_idle(),
            "input_silent": self._clock() - self._user_voice_at > INPUT_SILENT_S,
        }
        troubles = {code for code, shows in signs.items() if shows}
        for code in sorted(troubles - self._told):
            self._feed.emit("ext.warning", code=code)
        self._told = troubles

    def _is_idle(self) -> bool:
        """Whether the call will soon be ended if everybody stays silent."""
        idle_s = self._settings.idle_timeout_s
        if idle_s is None:
            return False
        return self._clock() - self._voice_at > idle_s - min(IDLE_WARNING_S, idle_s / 2)
