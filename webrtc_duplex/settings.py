"""Every knob, read once and checked once; frozen from then on."""

from dataclasses import dataclass, field
from pathlib import Path

from webrtc_duplex.errors import RequestError


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine process is started with."""

    model: str = "tiny"
    """`tiny`, `echo`, or the directory of a checkpoint."""
    rows: int | None = 4
    """Callers at once; None: as many as a step measured at start-up leaves time for (`--rows auto`)."""
    phases: int = 1
    """Sub-ticks in 80 ms; rows are spread over them."""
    device: str = "cpu"
    resume_grace_s: float = 10.0
    """How long the row of a vanished caller is kept; 0: it ends at once."""
    connect_deadline_s: float = 15.0
    """How long a lease may wait for its caller's media."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise RequestError(f"rows must be at least 1, not {self.rows}", param="rows")
        if self.phases < 1:
            raise RequestError(f"phases must be at least 1, not {self.phases}", param="phases")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What one server process is started with."""

    host: str = "127.0.0.1"
    port: int = 8080
    media_timeout_s: float = 5.0
    """No RTP, RTCP or STUN for so long: the caller has vanished."""
    static: Path | None = None
    """Directory of the page; None: the one in the package."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration of one `webrtc-duplex serve`."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
