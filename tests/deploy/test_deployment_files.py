"""Deployment files: valid by Kubernetes' own schemas, and true to what the server does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ramet.runtime.config import EngineConfig
from ramet.runtime.gateway.http.app import ROUTES
from ramet.runtime.gateway.http.metrics import Metrics
from ramet.runtime.launch import STOP_SECONDS

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("Dockerfile.*"))
PATHS = {path for path, _, _ in ROUTES}
LABELS = {"app.kubernetes.io/name": "ramet"}
POD_MONITOR = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["selector", "podMetricsEndpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {"type": "object", "required": ["matchLabels"]},
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["port"],
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string", "pattern": "^/"},
                            "interval": {"type": "string", "pattern": r"^\d+(ms|s|m)$"},
                        },
                    },
                },
            },
        },
    },
}


def documents() -> dict[str, dict[str, Any]]:
    loaded = [yaml.safe_load(path.read_text()) for path in KUBERNETES]
    return {document["kind"]: document for document in loaded}


@pytest.fixture(scope="module")
def container() -> dict[str, Any]:
    (found,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_kubernetes_takes_it(path):
    document = yaml.safe_load(path.read_text())
    if document["kind"] == "PodMonitor":
        jsonschema.validate(document, POD_MONITOR)
    else:
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_a_misspelt_field_would_be_found():
    document = documents()["Deployment"]
    document["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_all_parts_are_there_and_find_each_other():
    found = documents()
    kinds = {"Deployment", "Service", "PodMonitor", "Secret", "HorizontalPodAutoscaler"}
    assert found.keys() == kinds
    assert all(document["metadata"]["labels"] == LABELS for document in found.values())
    deployment = found["Deployment"]["spec"]
    assert deployment["template"]["metadata"]["labels"] == LABELS
    assert deployment["selector"]["matchLabels"] == LABELS
    assert found["Service"]["spec"]["selector"] == LABELS
    assert found["PodMonitor"]["spec"]["selector"]["matchLabels"] == LABELS
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (
        "Deployment",
        found["Deployment"]["metadata"]["name"],
    )
    assert "replicas" not in deployment  # or each apply would undo what the autoscaler did


def test_probes_and_ports_are_the_servers(container):
    assert container["startupProbe"]["httpGet"]["path"] == "/ready"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    (port,) = container["ports"]
    assert port == {"name": "http", "containerPort": 8000}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
    found = documents()
    (scraped,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert (scraped["port"], scraped["path"]) == ("http", "/metrics")
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    assert {"/ready", "/health", "/metrics"} <= PATHS


def test_the_key_comes_from_the_secret(container):
    (key,) = container["env"]
    secret = documents()["Secret"]
    assert key["name"] == "RAMET_API_KEY"
    assert key["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]
    assert key["valueFrom"]["secretKeyRef"]["key"] in secret["stringData"]


def test_it_may_do_little_and_has_time_to_drain(container):
    pod = documents()["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]
    written = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert written == {"/models", "/tmp"}
    slept = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drained = slept + EngineConfig().drain_seconds + STOP_SECONDS
    assert pod["terminationGracePeriodSeconds"] > drained


def test_the_autoscaler_reads_a_metric_that_there_is():
    (metric,) = documents()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert name.startswith("ramet_")
    ours = name.replace("ramet_", "ramet:", 1)
    assert f"{ours}{{" in Metrics().text({}).decode()
    assert ours in (ROOT / "deploy/kubernetes/hpa.yaml").read_text()


def test_the_arguments_are_settings(container):
    for arguments in (container["args"], *map(command_of, DOCKERFILES)):
        model, *flags = arguments
        settings: dict[str, Any] = {"model_path": model, "api_key": "k"}
        for name, value in zip(flags[::2], flags[1::2], strict=True):
            settings[name.removeprefix("--").replace("-", "_")] = (
                int(value) if value.isdigit() else value
            )
        config = EngineConfig.from_settings(settings)
        assert (config.host, config.port) == ("0.0.0.0", 8000)


# --- images ---------------------------------------------------------------------------------------


def instructions(path: Path) -> list[tuple[str, str]]:
    """Of a Dockerfile: (instruction, arguments)."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def command_of(path: Path) -> list[str]:
    return json.loads(dict(instructions(path))["CMD"])


KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL",
    "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix)
def test_an_image(path):
    steps = instructions(path)
    assert {name for name, _ in steps} <= KNOWN
    bases = [rest.split()[0] for name, rest in steps if name == "FROM"]
    for base in bases:
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", base), "pinned to a version"
    final = steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]
    found = dict(final)
    assert found["USER"].isdigit()
    assert int(found["USER"]) >= 1000
    assert found["EXPOSE"] == "8000"
    assert "/health" in found["HEALTHCHECK"]
    assert "--start-period=" in found["HEALTHCHECK"]
    assert json.loads(found["ENTRYPOINT"]) == ["ramet", "serve"]
    for name, rest in steps:
        if name == "COPY" and "--from" not in rest:
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists(), source
    ran = " ".join(rest for name, rest in steps if name == "RUN")
    assert "-c constraints.txt" in ran
    assert "COPY . " not in path.read_text()


def test_images_are_there_for_both_kinds_of_machine():
    assert {path.suffix for path in DOCKERFILES} == {".cpu", ".cuda"}
