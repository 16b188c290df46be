"""The files for a cluster are what Serve and KubeRay take, and speak of knobs that exist."""

from typing import Any

import pytest

from tests.conftest import ROOT
from webrtc_duplex import settings

yaml = pytest.importorskip("yaml")

DEPLOY = ROOT / "scripts" / "deploy"
KNOBS = {knob.name: knob for knob in settings.knobs()}


def serve_config() -> Any:
    return yaml.safe_load((DEPLOY / "serve-cluster.yaml").read_text())


def kuberay_config() -> Any:
    """The Serve configuration inside the manifest."""
    manifest = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    return yaml.safe_load(manifest["spec"]["serveConfigV2"])


@pytest.mark.parametrize("config", [serve_config(), kuberay_config()])
def test_every_setting_is_a_knob_with_a_value_it_takes(config: Any) -> None:
    (application,) = config["applications"]
    for name, value in application["args"]["settings"].items():
        KNOBS[name].parse(str(value), name)


def test_pods_may_end_only_after_the_longest_call() -> None:
    manifest = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    (application,) = kuberay_config()["applications"]
    drain_s = application["args"]["engine"]["graceful_shutdown_timeout_s"]
    assert manifest["kind"] == "RayService"
    for group in manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > drain_s
        assert pod["hostNetwork"] is True


@pytest.mark.parametrize("config", [serve_config(), kuberay_config()])
def test_serve_takes_the_file_and_builds_the_application(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs Ray: scripts/test_cluster.sh")
    from webrtc_duplex.cluster.app import build

    monkeypatch.setenv("WEBRTC_DUPLEX_SIGNING_KEY", "k" * 32)
    schema.ServeDeploySchema.model_validate(config)
    build(config["applications"][0]["args"])
