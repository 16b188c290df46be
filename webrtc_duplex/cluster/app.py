"""The Serve application: two deployments, `Engine` (a server with its device) and `Front` (the way in).

serve deploy scripts/deploy/serve-cluster.yaml                  a real cluster
webrtc-duplex serve --cluster 2 --rows 2 --model tiny           a try on this machine
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from webrtc_duplex.cluster.gate import RETRY_AFTER_S, Engines, Gate
from webrtc_duplex.cluster.replica import Answer, Headers, Replica
from webrtc_duplex.errors import CapacityError, RequestError
from webrtc_duplex.settings import ENVIRONMENT_PREFIX

SIGNING_KEY = f"{ENVIRONMENT_PREFIX}SIGNING_KEY"
CONTROL_PORTS = "20000-29999"
"""Outside Ray's own (10002-19999). Front processes must reach them, and nobody else."""
CHOICE_S = 0.25
"""So long Serve's own router may look for a row."""
LONGEST_CALL_S = 3600.0
"""So long a replica that is to go waits for its calls; then they are cut off. The old version's deadline counts."""


class Engine:
    """A replica: `max_ongoing_requests` is its rows, so Serve itself knows when it is full."""

    async def __init__(self, settings: Mapping[str, str], control_ports: str) -> None:  # type: ignore[misc]
        self._replica = Replica(settings, ray.util.get_node_ip_address(), control_ports)
        await self._replica.start()

    async def call(self, method: str, path: str, headers: Headers, body: bytes) -> AsyncIterator[Answer]:
        """One request; of an offer that was accepted, until the call is over."""
        async for answer in self._replica.call(method, path, headers, body):
            yield answer

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        if not await self._replica.is_healthy():
            raise RuntimeError("the server does not answer, or has no engine")

    async def __del__(self) -> None:
        await self._replica.stop()


class Handle:
    """`gate.Engines` behind Serve's router."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._call = handle.options(method_name="call", stream=True)

    async def call(self, method: str, path: str, headers: Headers, body: bytes) -> AsyncIterator[Answer]:
        """Raises CapacityError when every row of every replica is taken."""
        answers, answered = self._call.remote(method, path, headers, body), False
        try:
            async for answer in answers:
                answered = True
                yield answer
        except asyncio.CancelledError:
            if not answered:  # nobody waits any more, so no replica need do it; a call that is up goes on
                answers.cancel()
            raise
        except BackPressureError as full:
            raise _every_row_is_leased() from full


class PatientHandle:
    """The same without a router of ours, for the day that Serve's alpha API moves: a refusal takes `CHOICE_S`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._call = handle.options(method_name="call", stream=True)

    async def call(self, method: str, path: str, headers: Headers, body: bytes) -> AsyncIterator[Answer]:
        """Raises CapacityError when no replica was found in time."""
        async with AsyncExitStack() as choice:
            try:
                async with asyncio.timeout(CHOICE_S):
                    replica = await choice.enter_async_context(self._call.choose_replica(method, path, headers, body))
            except TimeoutError:
                raise _every_row_is_leased() from None
            async for answer in self._call.dispatch(replica, method, path, headers, body):
                yield answer


_ROUTERS: dict[str, Callable[[DeploymentHandle], Engines]] = {"rows": Handle, "choice": PatientHandle}
"""By the name that `build` takes."""


def _every_row_is_leased() -> CapacityError:
    return CapacityError("every row of the cluster is leased", retry_after_s=RETRY_AFTER_S)


class Front:
    """The way in, as Serve deploys it: what it does is `gate.Gate`'s."""

    def __init__(self, engines: DeploymentHandle, signing_key: str, router: str) -> None:
        self._gate = Gate(_ROUTERS[router](engines), signing_key)

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Serve where the replica runs."""
        return self._gate.app()


def build(args: dict[str, Any]) -> Application:
    """The application, as YAML's `args` describe it. Raises RequestError.

    `settings`: knobs of `webrtc-duplex serve`, by name; `rows` must be among them, as a number. `engine`, `front`:
    options of the two deployments over those here (`num_replicas`, `autoscaling_config`, `ray_actor_options` ...).
    `router`: `rows` (ours, which refuses at once) or `choice` (Serve's own, which is asked for a quarter of a second).
    """
    settings = {name: str(value) for name, value in args["settings"].items()}
    if not settings.get("rows", "").isdigit():
        raise RequestError("a cluster needs `rows` as a number: so many calls is what a replica is given", param="rows")
    key = settings.pop("signing_key", None) or os.environ.get(SIGNING_KEY)
    if key is None:
        raise RequestError(f"a cluster needs a signing_key, the same for all: set {SIGNING_KEY}", param="signing_key")
    router = args.get("router", "rows")
    if router not in _ROUTERS:
        raise RequestError(f"router must be {' or '.join(_ROUTERS)}, not {router!r}", param="router")
    engine = {**_engine_options(int(settings["rows"]), router), **args.get("engine", {})}
    front = {**_FRONT_OPTIONS, **args.get("front", {})}
    engines = serve.deployment(Engine, name="Engine").options(**engine)
    fronts = serve.deployment(serve.ingress()(Front), name="Front").options(**front)
    control_ports = args.get("control_ports", CONTROL_PORTS)
    return fronts.bind(engines.bind({**settings, "signing_key": key}, control_ports), key, router)


def _engine_options(rows: int, router: str) -> dict[str, Any]:
    ours = RequestRouterConfig(request_router_class="webrtc_duplex.cluster.router:RowRouter")
    return {
        "max_ongoing_requests": rows,
        "graceful_shutdown_timeout_s": LONGEST_CALL_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        **({"request_router_config": ours} if router == "rows" else {}),
    }


_FRONT_OPTIONS: dict[str, Any] = {
    "num_replicas": 2,
    "max_ongoing_requests": 10_000,  # event streams and sidebands count
    "graceful_shutdown_timeout_s": 10.0,
    "ray_actor_options": {"num_cpus": 0.1},
}
