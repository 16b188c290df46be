"""The server held against the document that it tells of itself, by schemathesis, over a real socket."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from tests.engine_doubles import EchoDouble, engine_thread
from tests.server.served import CALLS, OFFER
from webrtc_duplex.server.app import make_app
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.openapi import document
from webrtc_duplex.settings import Settings

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis (pip install schemathesis)")
NOT_FOR_US = {
    "positive_data_acceptance",  # most texts are no SDP, and no schema can say which are
    "ignored_auth",  # a server on loopback asks for no key
    "missing_required_header",
    "use_after_free",  # a call that has ended is shown for a minute
}


async def _serve(folder: Path, started: threading.Event, stop: threading.Event, address: list[str]) -> None:
    with engine_thread(folder, EchoDouble(16)) as socket:
        async with EngineClient(socket) as engine:
            await engine.wait_ready(30)
            runner = web.AppRunner(make_app(Settings(), engine))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.05)
            await runner.cleanup()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    started, stop, address = threading.Event(), threading.Event(), list[str]()
    folder = tmp_path_factory.mktemp("engine")
    thread = threading.Thread(target=lambda: asyncio.run(_serve(folder, started, stop, address)))
    thread.start()
    assert started.wait(60)
    yield address[0]
    stop.set()
    thread.join()


@schemathesis.serializer("application/sdp", "application/trickle-ice-sdpfrag")  # type: ignore[untyped-decorator]
def as_text(_: object, value: object) -> bytes:
    return str(value).encode(errors="replace")


schema = schemathesis.openapi.from_dict(document())


def wanted_checks() -> list[object]:
    return [check for check in schemathesis.checks.CHECKS.get_all() if check.__name__ not in NOT_FOR_US]


@pytest.mark.slow
@schema.parametrize()  # type: ignore[untyped-decorator]
@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_server_does_what_its_document_says(case: Any, url: str) -> None:
    response = case.call(base_url=url, timeout=10)
    assert response.status_code != 500
    case.validate_response(response, checks=wanted_checks())


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("POST", CALLS, OFFER, "application/sdp"),
        ("POST", CALLS, {"type": "offer", "sdp": OFFER}, "application/json"),
        ("POST", "/whip", OFFER, "application/sdp"),
        ("POST", "/offer", {"type": "offer", "sdp": OFFER}, "application/json"),
        ("POST", "/api/offer", {"type": "offer", "sdp": OFFER}, "application/json"),
        ("POST", "/webrtc/offer", {"type": "offer", "sdp": OFFER, "webrtc_id": "a"}, "application/json"),
        ("POST", "/start", {"body": {"voice": "bob"}}, "application/json"),
        ("POST", "/v1/realtime/client_secrets", {"session": {"voice": "bob"}}, "application/json"),
        ("POST", "/v1/realtime/sessions", {"voice": "bob"}, "application/json"),
    ],
)
def test_a_good_request_gets_what_the_document_says(url: str, method: str, path: str, body: object, kind: str) -> None:
    case = schema[path][method].Case(body=body, media_type=kind, headers={"Content-Type": kind})
    response = case.call(base_url=url, timeout=10)
    assert response.status_code in (200, 201), response.text
    case.validate_response(response, checks=wanted_checks())


def test_every_route_is_in_the_document() -> None:
    app = make_app(Settings(), EngineClient(Path("no-engine.sock")))
    told = {(path, method) for path, operations in document()["paths"].items() for method in operations}  # type: ignore[attr-defined]
    served = {(route.resource.canonical, route.method.lower()) for route in app.router.routes() if route.resource}
    pages = {"/", "/ops", "/static/{name}"}
    assert {entry for entry in served if entry[0] not in pages and entry[1] != "head"} <= told


async def test_the_document_is_served(tmp_path: Path) -> None:
    assert document()["openapi"] == "3.1.0"
