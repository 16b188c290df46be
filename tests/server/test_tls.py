"""HTTPS by files, and by a certificate made at start."""

import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from webrtc_duplex.errors import RequestError
from webrtc_duplex.server.app import make_app
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.tls import make_tls
from webrtc_duplex.settings import ServerSettings, Settings


def test_without_a_certificate_it_is_plain_http() -> None:
    assert make_tls(ServerSettings()) is None


async def test_a_development_certificate_is_made_at_start() -> None:
    runner = web.AppRunner(make_app(Settings(), EngineClient(Path("no-engine.sock"))))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=make_tls(ServerSettings(tls_dev=True))).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}/healthz"
        async with aiohttp.ClientSession() as http:
            async with http.get(url, ssl=False) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get(url)
    finally:
        await runner.cleanup()


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "nothing.pem"
    file.write_text("nothing")
    with pytest.raises(RequestError, match="nothing.pem"):
        make_tls(ServerSettings(tls_cert=file, tls_key=file))
    with pytest.raises(RequestError, match="missing.pem"):
        make_tls(ServerSettings(tls_cert=tmp_path / "missing.pem", tls_key=file))


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="belong together"):
        ServerSettings(tls_cert=tmp_path)
    with pytest.raises(RequestError, match="no use"):
        ServerSettings(tls_cert=tmp_path, tls_key=tmp_path, tls_dev=True)


def test_old_versions_of_tls_are_not_spoken() -> None:
    context = make_tls(ServerSettings(tls_dev=True))
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
