"""The application around its routes: health, the page, what a failure becomes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from tests.server.served import Http, serving, serving_without_engine
from webrtc_duplex import logs
from webrtc_duplex.errors import CapacityError, EngineError, RequestError
from webrtc_duplex.server.app import PathLogger, make_app
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.failures import ENGINE, METRICS, answer_errors, error_response
from webrtc_duplex.server.metrics import Metrics
from webrtc_duplex.server.places import Places
from webrtc_duplex.settings import ServerSettings, Settings


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Http]:
    async with serving(tmp_path) as http:
        yield http


async def test_health_needs_no_engine_but_readiness_does() -> None:
    async with serving_without_engine() as http:
        assert (await http.get("/healthz")).status == 200
        ready = await http.get("/readyz")
        assert ready.status == 503
        body = await ready.json()
        assert (body["status"], body["reason"], body["rows"]) == ("unready", "the engine is starting", 0)


async def test_a_server_with_an_engine_is_ready(http: Http) -> None:
    ready = await http.get("/readyz")
    assert (ready.status, await ready.json()) == (200, {"status": "ready", "rows": 2, "free_rows": 2, "calls": 0})


@pytest.mark.parametrize("path", ["/", "/static/client.js", "/static/style.css"])
async def test_the_page_is_served_and_runs_only_its_own_scripts(http: Http, path: str) -> None:
    answer = await http.get(path)
    assert answer.status == 200
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/static/..%2fpyproject.toml", "/static/nothing.js", "/nothing", f"/static/{'a' * 300}"]
)
async def test_what_is_no_file_of_the_page_is_not_found(http: Http, path: str) -> None:
    answer = await http.get(path)
    assert answer.status == 404
    assert (await answer.json())["error"]["code"] == "not_found"


async def test_the_page_may_be_another_folder(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>mine")
    settings = Settings(server=ServerSettings(static=tmp_path))
    async with serving_without_engine(settings) as http:
        assert "mine" in await (await http.get("/")).text()


def test_a_folder_without_a_page_is_refused(tmp_path: Path) -> None:
    settings = Settings(server=ServerSettings(static=tmp_path))
    with pytest.raises(RequestError, match="static: there is no index.html in"):
        make_app(settings, EngineClient(Path("no-engine.sock")))


async def test_a_wrong_method_is_told_the_right_ones(http: Http) -> None:
    answer = await http.put("/v1/realtime/calls")
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD, POST"
    assert (await answer.json())["error"]["code"] == "method_not_allowed"


async def test_a_fault_of_ours_is_a_500_with_a_name_that_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: web.Request) -> web.Response:
        raise KeyError("secret detail")

    app = web.Application(middlewares=[answer_errors])
    app[METRICS] = Metrics(EngineClient(Path("no-engine.sock")))
    app.router.add_get("/", fail)
    async with TestClient(TestServer(app)) as http:
        answer = await http.get("/")
        body = await answer.text()
    assert answer.status == 500
    assert "secret detail" not in body
    assert answer.headers["X-Request-Id"] in body
    assert answer.headers["X-Request-Id"] in caplog.text


def test_an_error_of_ours_becomes_its_own_status_body_and_headers() -> None:
    app = make_app(Settings(), EngineClient(Path("no-engine.sock")))
    request = make_mocked_request("POST", "/", app=app)
    assert not app[ENGINE].ready

    full = error_response(CapacityError("all 2 rows are leased", retry_after_s=6.2), request)
    assert (full.status, full.headers["Retry-After"]) == (503, "7")
    down = error_response(EngineError("the engine is starting"), request)
    assert (down.headers["Retry-After"], down.headers["Connection"]) == ("5", "close")
    wrong = error_response(RequestError("no", code="unknown_voice", param="voice"), request)
    assert (
        wrong.text
        == '{"error": {"type": "invalid_request_error", "code": "unknown_voice", "message": "no", "param": "voice"}}'
    )


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [("/v1/realtime/calls", 201, "INFO"), ("/readyz", 200, "DEBUG"), ("/readyz", 503, "INFO")],
)
def test_the_access_log_holds_no_query(caplog: pytest.LogCaptureFixture, path: str, status: int, level: str) -> None:
    request = make_mocked_request("POST", f"{path}?instructions=Be+kind")
    with caplog.at_level("DEBUG"):
        PathLogger(logging.getLogger("access"), "").log(request, web.Response(status=status), 0.0)
    (record,) = caplog.records
    assert path in record.getMessage()
    assert "kind" not in record.getMessage()
    assert record.levelname == level


@pytest.mark.parametrize("where", ["path", "Location"])
def test_a_line_of_the_access_log_is_of_the_call_that_the_request_is_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    place = f"/v1/realtime/calls/{Places('0', b'key').new_call_id()}"
    path, headers = (place, {}) if where == "path" else ("/v1/realtime/calls", {"Location": place})
    monkeypatch.setattr(caplog.handler, "formatter", logs.JsonFormatter(None))
    with caplog.at_level("DEBUG"):
        response = web.Response(headers=headers)
        PathLogger(logging.getLogger("access"), "").log(make_mocked_request("POST", path), response, 0.0)
    assert json.loads(caplog.text)["call"] == place.rpartition("/")[2]


async def test_leaving_the_application_ends_its_tasks(tmp_path: Path) -> None:
    before = len(asyncio.all_tasks())
    async with serving(tmp_path):
        pass
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before
