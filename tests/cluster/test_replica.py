"""What a replica knows of its server's answers and of its place; Ray is not needed."""

import importlib.util
import json
import socket
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.server.served import CALLS, error_of, open_call, serving
from webrtc_duplex.__main__ import main
from webrtc_duplex.cluster.replica import Answer, Replica, call_of, free_port, place_of, url_of
from webrtc_duplex.errors import EngineError
from webrtc_duplex.server.places import Places
from webrtc_duplex.settings import ServerSettings, Settings


def test_a_place_says_where_a_server_is_and_back() -> None:
    assert place_of("10.1.2.3", 20001) == "0a0102034e21"
    assert url_of("0a0102034e21") == "http://10.1.2.3:20001"


def test_a_place_can_be_part_of_a_call_id_and_be_read_by_whoever_has_the_key() -> None:
    call_id = Places(place_of("10.1.2.3", 20001), b"k" * 32).new_call_id()
    assert url_of(Places("gate", b"k" * 32).place_of(call_id)) == "http://10.1.2.3:20001"


def test_the_call_of_an_sdp_answer_is_in_its_headers() -> None:
    headers = [("Content-Type", "application/sdp"), ("Location", "/whip/rtc_x?secret=cs_y"), ("X-Call-Secret", "cs_y")]
    assert call_of(Answer(201, headers, b"v=0")) == ("rtc_x", "cs_y")


@pytest.mark.parametrize("kind", ["answer", "offer"])
def test_the_call_of_a_json_answer_is_in_its_body(kind: str) -> None:
    body = json.dumps({"type": kind, "call_id": "rtc_x", "client_secret": {"value": "cs_y"}}).encode()
    assert call_of(Answer(200, [("content-type", "application/json; charset=utf-8")], body)) == ("rtc_x", "cs_y")


@pytest.mark.parametrize(
    "answer",
    [
        Answer(503, [("Content-Type", "application/json")], b'{"error": {}}'),
        Answer(200, [("Content-Type", "application/json")], b'{"object": "list"}'),
        Answer(200, [("Content-Type", "text/html")], b"<html>"),
    ],
)
def test_any_other_answer_has_opened_no_call(answer: Answer) -> None:
    assert call_of(answer) is None


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"no port of {port}-{port} is free"):
            free_port("127.0.0.1", f"{port}-{port}")


async def test_a_server_names_its_place_in_the_ids_of_its_calls(tmp_path: Path) -> None:
    settings = Settings(server=ServerSettings(place="0a0102034e21", signing_key="k" * 32))
    async with serving(tmp_path, settings=settings) as http:
        call = await open_call(http)
        assert Places("gate", b"k" * 32).place_of(call.id) == "0a0102034e21"
        elsewhere = Places("0a0102034e22", b"k" * 32).new_call_id()
        assert await error_of(await http.get(f"{CALLS}/{elsewhere}", headers=call.headers)) == (410, "call_lost", None)


@pytest.mark.parametrize(
    ("status", "rows", "healthy"),
    [(200, 2, True), (503, 2, True), (503, 0, False)],
    ids=["ready", "admits nobody, as its steps are late", "without an engine"],
)
async def test_only_a_server_without_an_engine_is_to_be_replaced(status: int, rows: int, healthy: bool) -> None:
    async def readyz(_: web.Request) -> web.Response:
        return web.json_response({"status": "?", "rows": rows}, status=status)

    app = web.Application()
    app.router.add_get("/readyz", readyz)
    replica = Replica({}, "127.0.0.1", "20000-29999")
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("")) as replica._http:
        assert await replica.is_healthy() is healthy
        await server.close()
        assert not await replica.is_healthy()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is there")
def test_without_ray_a_sentence_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--cluster"]) == 2
    assert "pip install 'webrtc-duplex[cluster]'" in capsys.readouterr().err


def test_a_cluster_takes_no_settings_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: scripts/test_cluster.sh")
    assert main(["serve", "--cluster", "--config", str(tmp_path / "settings.toml")]) == 2
    assert "not a --config file" in capsys.readouterr().err


def test_a_cluster_whose_port_is_taken_says_so_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs Ray: scripts/test_cluster.sh")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--cluster", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
