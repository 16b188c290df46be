"""The files for operators speak of metrics and options that exist."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from webrtc_duplex import settings
from webrtc_duplex.messages import Histogram, Stats
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.metrics import Metrics, _retell

DEPLOY = ROOT / "scripts" / "deploy"
NAME = re.compile(r"\bwebrtc_duplex_\w+")


def exported() -> set[str]:
    """Every series name that a server with an engine exports."""
    none = Histogram((1.0,), (0, 0), 0.0)
    stats = Stats(none, none, none, none, 0, 0, 0, 0, 0, 0)
    metrics = Metrics(EngineClient(Path("none.sock")))
    families = [*metrics.registry.collect(), *_retell(stats)]
    names = {f"webrtc_duplex_{name}" for name in ("rows", "rows_free", "admitting")}  # these need a live engine
    for family in families:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_every_metric_that_a_file_asks_for_is_exported(file: str) -> None:
    asked = set(NAME.findall((DEPLOY / file).read_text()))
    assert asked
    assert asked <= exported()


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("file", ["Dockerfile", "webrtc-duplex.service"])
def test_a_file_uses_only_options_that_serve_has(file: str) -> None:
    known = {knob.flag for knob in settings.knobs()} | {"--config"}
    for line in (DEPLOY / file).read_text().splitlines():
        if "webrtc-duplex serve" in line or line.startswith("CMD") or "serve --" in line:
            assert set(re.findall(r"--[a-z][a-z-]+", line.split("serve", 1)[1])) <= known
