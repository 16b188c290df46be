"""Many callers talk at once, in full duplex, to one speech-to-speech model, over WebRTC."""

from webrtc_duplex.errors import (
    AuthError,
    CallNotFoundError,
    CapacityError,
    CheckpointError,
    DuplexError,
    EngineError,
    RequestError,
    StaleEpochError,
)
from webrtc_duplex.messages import Lease, ModelCard, Prompt
from webrtc_duplex.settings import EngineSettings, ServerSettings, Settings

__all__ = [
    "AuthError",
    "CallNotFoundError",
    "CapacityError",
    "CheckpointError",
    "DuplexError",
    "EngineError",
    "EngineSettings",
    "Lease",
    "ModelCard",
    "Prompt",
    "RequestError",
    "ServerSettings",
    "Settings",
    "StaleEpochError",
]

__version__ = "0.1.0"
