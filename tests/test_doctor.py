"""The doctor says what is wrong, and what to do."""

import dataclasses
import resource
import socket
from pathlib import Path

import pytest

from webrtc_duplex.__main__ import main
from webrtc_duplex.doctor import examine
from webrtc_duplex.settings import EngineSettings, IceSettings, ServerSettings, Settings

ECHO = Settings(engine=EngineSettings(model="echo"), server=ServerSettings(port=0))


def advice(settings: Settings) -> dict[str, str]:
    return {finding.name: finding.advice for finding in examine(settings) if finding.advice is not None}


def test_a_healthy_machine_needs_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "echo", "--port", "0"]) == 0
    assert "!!" not in capsys.readouterr().out


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerSettings(port=taken.getsockname()[1])
        assert "or --port" in advice(dataclasses.replace(ECHO, server=server))["HTTP port"]


def test_a_page_that_would_get_no_microphone_is_named() -> None:
    settings = Settings(
        engine=ECHO.engine,
        server=ServerSettings(host="0.0.0.0", port=0),
        access=dataclasses.replace(ECHO.access, insecure=True),
    )
    assert "--tls-cert" in advice(settings)["microphone"]


def test_too_few_udp_ports_are_named() -> None:
    settings = dataclasses.replace(ECHO, ice=IceSettings(udp_ports="52000-52001"))
    assert "widen the range" in advice(settings)["UDP ports"]


def test_a_model_that_is_none_is_named(tmp_path: Path) -> None:
    settings = dataclasses.replace(ECHO, engine=EngineSettings(model=str(tmp_path)))
    assert "--model" in advice(settings)["model"]


def test_an_unwritable_recordings_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = dataclasses.replace(ECHO, server=ServerSettings(port=0, recordings=tmp_path / "file" / "folder"))
    assert "--recordings" in advice(settings)["recordings"]


@pytest.mark.parametrize(("hard", "helped"), [(65_536, True), (64, False)])
def test_the_limit_of_descriptors_counts_that_can_be_had(
    monkeypatch: pytest.MonkeyPatch, hard: int, helped: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    (finding,) = [finding for finding in examine(ECHO) if finding.name == "descriptors"]
    assert (finding.advice is None) is helped and str(hard) in finding.found
