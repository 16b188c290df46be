"""`webrtc-duplex serve --cluster`: the cluster on this machine alone, for a try."""

import logging
import os
import secrets
import signal
import threading
from collections.abc import Mapping

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from webrtc_duplex.cluster.app import SIGNING_KEY, build
from webrtc_duplex.errors import EngineError
from webrtc_duplex.launch.port import require_port
from webrtc_duplex.settings import Settings

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80_000_000
"""Calls hardly use it."""
APPLICATION = "webrtc-duplex"


def serve_cluster(settings: Settings, given: Mapping[str, str], replicas: int) -> int:
    """Serve until SIGINT or SIGTERM. `given` are the knobs as they were set, for the servers to read again.

    Raises RequestError for settings that no cluster can have, EngineError where the port is taken or no server starts.
    """
    require_port(settings.server.host, settings.server.port)
    os.environ.setdefault(SIGNING_KEY, secrets.token_urlsafe(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    drain = {"graceful_shutdown_timeout_s": settings.server.drain_timeout_s}
    own = {"insecure": "true"} if settings.access.open else {}  # the servers' own ports are on this machine's address
    knobs = {"rows": str(settings.engine.rows), **given, **own}
    engine = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": 1}, **drain}
    application = build({"settings": knobs, "engine": engine, "front": {"num_replicas": 1}})
    ray.init(address="local", num_cpus=replicas + 1, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
    try:
        serve.start(http_options=HTTPOptions(host=settings.server.host, port=settings.server.port))
        try:
            serve.run(application, name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise EngineError(f"no replica has started; what its server said stands above ({error})") from error
        logger.info("listening on http://%s:%d", settings.server.host, settings.server.port)
        _wait_for_signal()
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def _wait_for_signal() -> None:
    """Return when this process is asked to end."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    asked.wait()
