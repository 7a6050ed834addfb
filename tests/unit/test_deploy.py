"""The files of deploy/ agree with what the code reads: ports, probes, settings, signals, metrics and commands."""

from __future__ import annotations

import configparser
import inspect
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from lakebed.bench.commands import bench
from lakebed.cli.main import app
from lakebed.cli.where import DEFAULT_DIR
from lakebed.core.metrics import TABLE, Metrics
from lakebed.core.settings import env_name
from lakebed.embedded.endpoints import TARGETS_FILE
from lakebed.filer.transport import grpc_address
from lakebed.gateway import health, metrics
from lakebed.gateway.listen import STOP_SIGNALS
from lakebed.gateway.metrics import RIGHT
from lakebed.gateway.settings import GatewaySettings
from lakebed.meta.settings import MetaSettings
from lakebed.wiring.parts import sections

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPONENTS_S = 3  # to stop the components, behind the drain
PORTS = {"serve": 8080, "work": 8081}
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KNOWN = {env_name(f"{kind.section}.{name}") for kind in sections() for name in kind.__struct_fields__}


def dockerfile() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            found.setdefault(word, []).append(rest)
    return found


def manifests(kind: str) -> list[Any]:
    every = yaml.safe_load_all((DEPLOY / "kubernetes/lakebed.yaml").read_text())
    return [one for one in every if one["kind"] == kind]


def containers() -> list[Any]:
    return [
        (spec, container)
        for spec in (one["spec"]["template"]["spec"] for one in manifests("Deployment"))
        for container in spec["containers"]
    ]


def compose_services(file: Path = DEPLOY / "compose.yaml") -> Any:
    return yaml.safe_load(file.read_text())["services"]


def settings_in(text: str) -> set[str]:
    return set(re.findall(r"\bLAKEBED_[A-Z_]+", text))


def test_every_setting_in_the_files_exists() -> None:
    """A misspelt name would be refused at the start: by then it is deployed."""
    named = {name for file in DEPLOY.rglob("*") if file.is_file() for name in settings_in(file.read_text())}

    assert named and set() == named - KNOWN


def test_the_image_listens_where_the_others_look() -> None:
    """Ports of the image, the manifests, the probes, the compose file, the units and Prometheus are the same."""
    image = dict(word.split("=", 1) for word in dockerfile()["ENV"][0].split())
    ported = {
        args[0]: container["ports"][0]["containerPort"] for _, container in containers() for args in [container["args"]]
    }
    variables = {entry["name"]: entry["value"] for _, container in containers() for entry in container["env"]}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]

    assert {"serve": image["LAKEBED_GATEWAY_PORT"], "work": image["LAKEBED_GATEWAY_WORK_PORT"]} == {
        command: str(port) for command, port in PORTS.items()
    }
    assert PORTS == ported and "8080 8081" == dockerfile()["EXPOSE"][0]
    assert ("8080", "8081") == (variables["LAKEBED_GATEWAY_PORT"], variables["LAKEBED_GATEWAY_WORK_PORT"])
    for service in compose.values():
        assert f":{PORTS[service['command'][0]]}/healthz" in service["healthcheck"]["test"][-1]


def test_probes_ask_routes_that_exist() -> None:
    """Readiness asks the health route; liveness the port, since a restart does not help a store that is down."""
    routes = {route.path for route in health.routes(None)}  # type: ignore[attr-defined,arg-type]

    for _, container in containers():
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["path"] in routes
            assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
        assert container["livenessProbe"]["tcpSocket"]["port"] == container["ports"][0]["name"]


def test_nothing_is_killed_before_it_has_drained() -> None:
    """Each grace period is longer than what happens within it, and each stop is a signal that drains."""
    own_s = GatewaySettings().drain_s + COMPONENTS_S
    gateway, container = next(pair for pair in containers() if pair[1]["args"] == ["serve"])
    drain_s = float(next(e["value"] for e in container["env"] if e["name"] == "LAKEBED_GATEWAY_DRAIN_S"))
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]

    assert pause_s + drain_s + COMPONENTS_S < gateway["terminationGracePeriodSeconds"]
    assert {"SIGTERM"} == {*dockerfile()["STOPSIGNAL"], *(service["stop_signal"] for service in compose.values())}
    assert signal.SIGTERM in STOP_SIGNALS
    for service in compose.values():
        assert own_s < float(service["stop_grace_period"].removesuffix("s"))
    for unit in UNITS:
        service = read_unit(unit)["Service"]
        assert "SIGTERM" == service["KillSignal"] and own_s < float(service["TimeoutStopSec"])


def test_workers_are_not_killed_before_they_have_drained_either() -> None:
    """Their own requests are few, and their limit is the same."""
    own_s = GatewaySettings().drain_s + COMPONENTS_S
    (workers,) = [spec for spec, container in containers() if container["args"] == ["work"]]

    assert own_s < workers["terminationGracePeriodSeconds"]


def test_the_times_that_are_said_are_those_of_the_settings_and_the_files() -> None:
    """In the comments of the files and on the page about them: an operator sets other times by these."""
    page = (ROOT / "docs/operations/deploy.md").read_text()
    said = [file.read_text() for file in DEPLOY.rglob("*") if file.is_file()] + [page]
    drains = [float(number) for text in said for number in re.findall(r"gateway\.drain_s`? \(?(?:at )?(\d+) s", text)]
    (killed_s,) = re.findall(r"Compose and systemd .* kill after (\d+) s", page)
    graces = [service["stop_grace_period"] for service in compose_services().values()]
    graces += [f"{read_unit(unit)['Service']['TimeoutStopSec']}s" for unit in UNITS]

    assert len(drains) > 3 and {GatewaySettings().drain_s} == set(drains)
    assert {f"{killed_s}s"} == set(graces)


def test_gateways_and_workers_coordinate_in_one_place_that_all_of_them_reach() -> None:
    """The default is a file of one host: workers that used their own would see no topic of the gateways."""
    wanted, backend = env_name("meta.backend"), "bucket"
    example = dict(re.findall(r"^(LAKEBED_\w+)=(.*)$", (DEPLOY / "lakebed.env.example").read_text(), re.MULTILINE))
    variables = [{entry["name"]: entry["value"] for entry in container["env"]} for _, container in containers()]

    assert MetaSettings().backend != backend == example[wanted]
    assert [backend] * 2 == [each.get(wanted) for each in variables]
    assert {"lakebed.env"} == {service["env_file"] for service in compose_services().values()}


def test_gateways_and_workers_know_the_same_keys() -> None:
    """From the same secret, where their setting says that it is: without keys the port would let everybody in."""
    name = env_name("gateway.keys_file")
    for spec, container in containers():
        (file,) = [entry["value"] for entry in container["env"] if entry["name"] == name]
        (mount,) = container["volumeMounts"]
        (volume,) = spec["volumes"]
        assert (mount["mountPath"], mount["name"]) == (str(Path(file).parent), volume["name"])
        assert {"secretName": "lakebed-keys"} == volume["secret"] and mount["readOnly"]
        assert [{"secretRef": {"name": "lakebed"}}] == container["envFrom"]
    for service in compose_services().values():
        assert [f"./{Path(file).name}:{file}:ro"] == service["volumes"]


def test_the_gateway_scales_on_cpu_and_on_requests_in_flight() -> None:
    """By a gauge that the gateway has, of the deployment that is there and asks for CPU: a share needs its whole.

    Prometheus asks with the right that the route needs.
    """
    (scaler,) = manifests("HorizontalPodAutoscaler")
    metrics = {each["type"]: each for each in scaler["spec"]["metrics"]}
    resource, pods = metrics["Resource"]["resource"], metrics["Pods"]["pods"]
    requests = {container["name"]: container["resources"]["requests"] for _, container in containers()}

    assert ("cpu", "Utilization") == (resource["name"], resource["target"]["type"])
    assert 0 < resource["target"]["averageUtilization"] < 100 and requests["gateway"]["cpu"]
    assert ("lakebed_http_in_flight", "AverageValue") == (pods["metric"]["name"], pods["target"]["type"])
    assert int(pods["target"]["averageValue"]) > 0
    assert pods["metric"]["name"] in {metric.name for metric in TABLE if metric.kind == "gauge"}
    assert "lakebed-gateway" == scaler["spec"]["scaleTargetRef"]["name"]
    assert "lakebed-gateway" in {one["metadata"]["name"] for one in manifests("Deployment")}
    assert 2 <= scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]
    assert RIGHT in (DEPLOY / "monitoring/prometheus.yml").read_text()


def test_a_drain_of_nodes_takes_one_gateway_at_a_time() -> None:
    """And a rolling restart none before its successor is ready."""
    (budget,) = manifests("PodDisruptionBudget")
    (gateway,) = (one for one in manifests("Deployment") if one["metadata"]["name"] == "lakebed-gateway")

    assert 1 == budget["spec"]["maxUnavailable"] < gateway["spec"]["replicas"]
    assert gateway["spec"]["selector"] == budget["spec"]["selector"]
    assert {"maxSurge": 1, "maxUnavailable": 0} == gateway["spec"]["strategy"]["rollingUpdate"]


def test_the_network_policy_lets_out_what_the_code_calls_and_no_more() -> None:
    """Names, an object store over TLS, and SeaweedFS: S3, and the gRPC ports of its filers and masters."""
    (policy,) = manifests("NetworkPolicy")
    (egress,) = policy["spec"]["egress"]
    out = {(each.get("protocol", "TCP"), each["port"]) for each in egress["ports"]}
    filer, master = (int(grpc_address(f"host:{http}").rpartition(":")[2]) for http in (8888, 9333))

    assert ["Ingress", "Egress"] == policy["spec"]["policyTypes"]
    assert {("UDP", 53), ("TCP", 53), ("TCP", 443), ("TCP", 8333), ("TCP", filer), ("TCP", master)} == out


def test_selectors_budgets_and_policies_reach_the_pods() -> None:
    """A selector that matches nothing would leave a service empty and a policy without effect."""
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in manifests("Deployment")]
    selectors = [
        *(one["spec"]["selector"] for one in manifests("Service")),
        *(
            one["spec"]["selector"]["matchLabels"]
            for one in (*manifests("Deployment"), *manifests("PodDisruptionBudget"))
        ),
        *(one["spec"]["podSelector"]["matchLabels"] for one in manifests("NetworkPolicy")),
    ]
    (policy,) = manifests("NetworkPolicy")

    assert all(any(wanted.items() <= labels.items() for labels in pods) for wanted in selectors)
    assert set(PORTS.values()) == {each["port"] for each in policy["spec"]["ingress"][0]["ports"]}


def read_unit(file: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(file.read_text())
    return unit


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_a_unit_starts_a_command_that_exists(file: Path) -> None:
    """With options that the command has."""
    program, *words = read_unit(file)["Service"]["ExecStart"].split()

    assert "/opt/lakebed/bin/lakebed" == program
    app.parse_args(words, exit_on_error=False, print_error=False)


def scrape_jobs() -> dict[str, Any]:
    """Of the Prometheus beside a stack."""
    every = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    return {job["job_name"]: job for job in every}


def test_prometheus_scrapes_each_process_of_the_compose_file_at_a_port_that_it_publishes() -> None:
    """Both gateways and the workers, whose metrics are those of compaction and retention, with a key."""
    job, published = scrape_jobs()["lakebed"], list[str]()
    for service in compose_services().values():
        (mapping,) = service["ports"]
        outside, _, inside = mapping.rpartition(":")
        assert str(PORTS[service["command"][0]]) == inside
        published.append(outside)

    (static,) = job["static_configs"]
    assert sorted(published) == sorted(static["targets"]) and len(published) == len(set(published))
    assert env_name("gateway.keys_file") in (DEPLOY / "lakebed.env.example").read_text()
    assert job["authorization"]


def test_the_key_of_prometheus_is_made_by_a_command_that_is_documented_and_in_no_commit() -> None:
    """The file that the job reads is the one that the command writes, with the right that the route demands."""
    file = Path("deploy/monitoring") / scrape_jobs()["lakebed"]["authorization"]["credentials_file"]
    page = (ROOT / "docs/operations/deploy.md").read_text()
    (said,) = re.findall(rf"^docker compose .* exec -T (\S+) lakebed (.*) \| .* > {file}$", page, re.MULTILINE)

    assert said[0] in compose_services()
    app.parse_args(said[1].split(), exit_on_error=False, print_error=False)
    assert f"--rights {RIGHT}" in said[1]
    for ignored in (".gitignore", ".dockerignore"):
        assert str(file) in (ROOT / ignored).read_text().splitlines()


def test_prometheus_finds_local_stacks_and_load_tests_by_the_files_that_they_write() -> None:
    """In their default folders, without a key: they listen on loopback."""
    job = scrape_jobs()["lakebed-local"]
    (found,) = job["file_sd_configs"]
    out = inspect.signature(bench).parameters["out"].default

    assert "authorization" not in job
    assert [ROOT / DEFAULT_DIR / TARGETS_FILE, ROOT / out / TARGETS_FILE] == [
        (DEPLOY / "monitoring" / file).resolve() for file in found["files"]
    ]


def test_the_files_that_are_named_exist() -> None:
    """Dashboards and rules are those that the documentation has."""
    prometheus = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())
    compose = yaml.safe_load((DEPLOY / "monitoring/compose.yaml").read_text())
    mounted = [volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]]

    for named in (*prometheus["rule_files"], *mounted):
        assert (DEPLOY / "monitoring" / named).exists(), named


def test_metrics_are_scraped_where_each_pod_serves_them() -> None:
    """By the annotations of the pods, and by Prometheus beside a stack, at a route that the gateway has."""
    routes = {route.path for route in metrics.routes(Metrics())}  # type: ignore[attr-defined]
    for job in scrape_jobs().values():
        assert job["metrics_path"] in routes
    for deployment in manifests("Deployment"):
        pod = deployment["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        asked = {name.partition("/")[2]: value for name, value in pod["metadata"]["annotations"].items()}
        assert {"scrape": "true", "port": str(PORTS[container["args"][0]]), "path": "/metrics"} == asked
        assert asked["path"] in routes


def test_the_service_sends_requests_to_gateways_alone() -> None:
    """At the port's name: workers have no routes for clients."""
    (service,) = manifests("Service")
    (port,) = service["spec"]["ports"]
    named = {
        one["metadata"]["name"]: [each["name"] for each in one["spec"]["template"]["spec"]["containers"][0]["ports"]]
        for one in manifests("Deployment")
        if service["spec"]["selector"].items() <= one["spec"]["template"]["metadata"]["labels"].items()
    }

    assert {"lakebed-gateway": [port["targetPort"]]} == named


def test_pods_run_as_the_users_of_the_image_and_may_do_no_more() -> None:
    """No root, no capabilities; what a pod asks for is within what it may use."""
    user = int(dockerfile()["USER"][0])
    assert any(f"--uid {user} " in step for step in dockerfile()["RUN"])
    for spec, container in containers():
        pod, own = spec["securityContext"], container["securityContext"]
        assert (True, user, "RuntimeDefault") == (pod["runAsNonRoot"], pod["runAsUser"], pod["seccompProfile"]["type"])
        assert (False, ["ALL"]) == (own["allowPrivilegeEscalation"], own["capabilities"]["drop"])
        asked, most = (container["resources"][each]["memory"] for each in ("requests", "limits"))
        assert int(asked.removesuffix("Gi")) <= int(most.removesuffix("Gi"))


def test_compose_publishes_each_gateway_on_a_port_of_its_own_and_on_loopback_alone() -> None:
    """The one behind it is the image's; so is that of the workers. All are of one image and come back by themselves."""
    services = compose_services()
    gateways = {name: one for name, one in services.items() if one["command"] == ["serve"]}
    published = [port.split(":") for one in gateways.values() for port in one["ports"]]

    assert len(gateways) == len({port for _, port, _ in published}) > 1
    assert {("127.0.0.1", str(PORTS["serve"]))} == {(host, inner) for host, _, inner in published}
    assert {"workers"} == set(services) - set(gateways)
    assert [f"127.0.0.1:{PORTS['work']}:{PORTS['work']}"] == services["workers"]["ports"]
    assert {("lakebed", "unless-stopped")} == {(one["image"], one["restart"]) for one in services.values()}
    for service in services.values():
        assert service["stop_signal"] and set(service["healthcheck"]) == {
            "test", "interval", "timeout", "retries", "start_period"
        }  # fmt: skip


SERVED = [file for file in UNITS if "agent" not in file.name]


@pytest.mark.parametrize("file", SERVED, ids=lambda file: file.name)
def test_a_unit_serves_at_its_port_with_the_settings_of_its_file(file: Path) -> None:
    """The gateway and the workers of one machine do not meet at a port, and Prometheus finds both."""
    service = read_unit(file)["Service"]
    command, *options = service["ExecStart"].split()[1:]

    assert ["--port", str(PORTS[command])] == options
    assert "/etc/lakebed/lakebed.env" == service["EnvironmentFile"]
    example = (DEPLOY / "lakebed.env.example").read_text()
    assert f"{env_name('gateway.keys_file')}=/etc/lakebed/keys.toml\n" in example


def test_the_units_are_one_gateway_one_worker_and_one_agent() -> None:
    """Each runs its own command."""
    commands = [read_unit(file)["Service"]["ExecStart"].split()[1:3] for file in UNITS]

    assert [["agent", "run"], ["serve", "--port"], ["work", "--port"]] == commands


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_a_unit_writes_only_to_its_own_folder_and_comes_back(file: Path) -> None:
    """The rest of the machine is read-only to it, so what it writes must be there: the agent its queue."""
    unit = read_unit(file)
    service = unit["Service"]
    folder = f"/var/lib/{service['StateDirectory']}"
    written = [service["WorkingDirectory"]] if "WorkingDirectory" in service else []
    if "Environment" in service:
        name, _, value = service["Environment"].partition("=")
        written += [value] if name == env_name("agent.queue_dir") else []

    assert [folder] == written
    assert "strict" == service["ProtectSystem"] and service["ProtectHome"] in ("yes", "read-only")
    assert ("yes", "lakebed") == (service["NoNewPrivileges"], service["User"])
    assert service["Restart"] in ("always", "on-failure") and float(service["RestartSec"]) >= 1
    assert service["EnvironmentFile"].startswith("/etc/lakebed/")
    assert "multi-user.target" == unit["Install"]["WantedBy"]
    assert "network-online.target" == unit["Unit"]["After"] == unit["Unit"]["Wants"]


def test_the_numbers_that_the_page_gives_reasons_for_are_those_of_the_manifests() -> None:
    """An operator who changes one reads there why it is what it is."""
    page = (ROOT / "docs/operations/deploy.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", page, re.MULTILINE))
    spec, gateway = next(pair for pair in containers() if pair[1]["args"] == ["serve"])
    (scaler,) = manifests("HorizontalPodAutoscaler")
    metrics = {each["type"]: each for each in scaler["spec"]["metrics"]}
    up, down = (scaler["spec"]["behavior"][way] for way in ("scaleUp", "scaleDown"))
    startup, ready = gateway["startupProbe"], gateway["readinessProbe"]
    (grown,), (shrunk,) = up["policies"], down["policies"]

    assert f"`/healthz`, up to {startup['periodSeconds'] * startup['failureThreshold']} s" == rows["startup"]
    assert f"`/healthz` every {ready['periodSeconds']} s" == rows["readiness"]
    assert f"{gateway['lifecycle']['preStop']['exec']['command'][1]} s" == rows["the load balancer forgets the pod"]
    assert f"{spec['terminationGracePeriodSeconds']} s" == rows["the process is killed"]
    assert f"{COMPONENTS_S} s" == rows["components stop: derived writes, leases of ticks"]
    assert rows["CPU"].startswith(f"{metrics['Resource']['resource']['target']['averageUtilization']} %")
    assert rows["in flight"].startswith(f"{metrics['Pods']['pods']['target']['averageValue']} ")
    assert ("Percent", 100, f"doubles every {grown['periodSeconds']} s") == (grown["type"], grown["value"], rows["up"])
    after_s = down["stabilizationWindowSeconds"]
    assert ("Pods", 1) == (shrunk["type"], shrunk["value"])
    assert f"one every {shrunk['periodSeconds']} s, after {after_s} s" == rows["down"]
    assert f"{scaler['spec']['minReplicas']}, {scaler['spec']['maxReplicas']}" == rows["least, most"]


def test_grafana_finds_the_dashboards_and_their_data() -> None:
    """The folder that is provided is the one that is mounted, and the data comes from the Prometheus beside it."""
    grafana = compose_services(DEPLOY / "monitoring/compose.yaml")["grafana"]
    prometheus = compose_services(DEPLOY / "monitoring/compose.yaml")["prometheus"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    (provider,) = yaml.safe_load((DEPLOY / "monitoring/grafana/dashboards/lakebed.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((DEPLOY / "monitoring/grafana/datasources/prometheus.yaml").read_text())["datasources"]
    address = next(word for word in prometheus["command"] if "listen-address" in word).partition("=")[2]

    assert provider["options"]["path"] == mounted["../../docs/dashboards"]
    assert {"datasources", "dashboards"} == {folder.name for folder in (DEPLOY / "monitoring/grafana").iterdir()}
    assert "/etc/grafana/provisioning" == mounted["./grafana"]
    assert ("prometheus", f"http://{address}", True) == (source["type"], source["url"], source["isDefault"])
    assert f"--config.file={prometheus['working_dir']}/prometheus.yml" in prometheus["command"]
