"""What the manifests say of each other, of the service's settings and of Ray, is so."""

from __future__ import annotations

import json
import re
import warnings
from functools import cache
from ipaddress import ip_network
from typing import Any

import helm_python
import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from deploy.chart import CHART
from service.app import check_address
from service.backends.kuberay.first_secrets import PARTS
from service.local.ray_node import TRAINER_SETTINGS
from service.settings import Settings
from tests.harness.kube.objects import merged
from tests.unit.k8s.pods import pods, pods_of, selects
from tests.unit.k8s.rendering import (
    FULL,
    PROJECT,
    build,
    chart,
    every_variant,
    objects_of,
    of_kind,
    one,
    ray_cluster,
    settings_of,
    template_of,
    values,
)

_CLUSTER = "shardloom-ray"
# What docs/guides/kubernetes.md has people make; with Redis of their own its password, too.
_BROUGHT = ("shardloom-database", "url")


def _references(node: Any, key: str) -> list[Any]:
    """Every value of a key, wherever it stands."""
    if isinstance(node, list | tuple):
        return [found for each in node for found in _references(each, key)]
    if not isinstance(node, dict):
        return []
    own = [node[key]] if key in node else []
    return own + [found for each in node.values() for found in _references(each, key)]


# ---- the service


def _settings(variant: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings as a replica would read them, with made-up secrets."""
    (pod,) = pods(variant, "service")
    (container,) = pod.containers
    variables = settings_of(variant)
    for each in container["env"]:
        variables[each["name"]] = each.get("value", "x" * 40)
    for name in ("SHARDLOOM_FIRST_KEY", "SHARDLOOM_METRICS_KEY"):
        variables.pop(name, None)
    variables["SHARDLOOM_DATABASE_URL"] = "postgresql://user:password@host/database"
    names = {name.removeprefix("SHARDLOOM_").lower() for name in variables}
    unknown = {name for name in names if name not in Settings.model_fields} - _OTHERS
    assert not unknown, f"no settings of the service: {unknown}"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Settings()


_BALANCER = "35.191.0.0/16"
_OTHERS = {"forwarded_allow_ips", "nicegui_storage_path"}


@every_variant
def test_the_settings_fit_the_service_and_ray(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(variant, monkeypatch)
    check_address(settings, has_credentials=True)
    proxies = {*map(ip_network, settings_of(variant)["FORWARDED_ALLOW_IPS"].split(","))}
    is_let_in = _BALANCER in str(of_kind(build(variant), "NetworkPolicy"))
    assert {str(each) for each in proxies if each.is_global} == (
        {_BALANCER} if is_let_in else set()
    )
    assert settings.auth == "required"
    assert settings.replica_id == "x" * 40
    (pod,) = pods(variant, "service")
    (container,) = pod.containers
    assert [port["containerPort"] for port in container["ports"]] == [settings.port]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    roots = [str(root) for root in settings.storage_roots or [] if "s3:" not in str(root)]
    assert {str(settings.home), str(settings.runs_dir), *roots} <= mounts
    # Open requests are given up before Kubernetes does so.
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause_s + settings.shutdown_timeout_s < pod.spec["terminationGracePeriodSeconds"]
    service = one(build(variant), "Service", "shardloom")
    (port,) = service["spec"]["ports"]
    assert settings.service_url == f"http://shardloom.shardloom.svc:{port['port']}"
    assert selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
    assert ray_cluster(variant)["metadata"]["name"] == _CLUSTER
    if settings.backend == "kuberay":
        assert str(settings.kuberay_template_file.parent) in mounts
    if "own-only" in variant:
        assert settings.ray_address == ""
        return
    # The name that KubeRay gives to the Service of a head.
    assert settings.ray_address == f"http://{_CLUSTER}-head-svc.shardloom.svc:8265"
    most = 0
    for worker in pods(variant, "ray-worker"):
        limits = worker.containers[0]["resources"]["limits"]
        most += worker.replicas * parse_quantity(limits.get("nvidia.com/gpu", limits["cpu"]))
    assert settings.cluster_max_workers == most


def test_a_part_of_a_cpu_holds_the_worker_that_ray_starts_on_it() -> None:
    (group,) = values("dev")["ray"]["groups"]
    made = objects_of(merged(values("dev"), {"ray": {"groups": [{**group, "cpus": 0.5}]}}))
    settings = one(made, "ConfigMap", "shardloom-settings")["data"]
    assert settings["SHARDLOOM_CLUSTER_MAX_WORKERS"] == str(group["maxHosts"])


# By key: values that stay, as they hide what others say or are no free text; the form of others.
_UNMARKED = {
    *("accessMode", "faultTolerance", "kind", "operator", "upgradeStrategy"),
    *("address", "digest", "diskGiB", "embedded", "existingClaim", "hostGiB", "projects"),
}
_PEERS: list[Any] = [{"podSelector": {"matchLabels": {}}}]
_FORMS: dict[str, Any] = {
    "checkpointRoot": "s3://{}",
    "diskGiB": 0,
    "parentRefs": [{"name": ""}],
    "pullSecrets": [""],
    "resource": "{}/rdma",
    "roots": ["s3://{}"],
    "settings": {"SHARDLOOM_OIDC_ISSUER": ""},
    "spread": [{"label": "", "required": True}],
    "tolerations": [{"key": "", "operator": "Exists"}],
    "outside": [{"cidr": "1::/32"}],
    **{"to": _PEERS, "inside": _PEERS, "ingressFrom": _PEERS, "extraEgress": [{"to": _PEERS}]},
}


def _marked(key: str, node: Any, marks: list[str]) -> Any:
    """The values below `node`, with a mark of its own in every place that takes one."""
    node = _FORMS.get(key, node)
    if key in _UNMARKED:
        return node
    if isinstance(node, dict) and node:
        return {name: _marked(name, each, marks) for name, each in node.items()}
    if isinstance(node, list):
        return [_marked("", each, marks) for each in node]
    if isinstance(node, bool):
        return node or key == "enabled"
    is_number = str(node)[:1].isdigit()
    mark = f"{'' if is_number else 'mark'}{7001 + len(marks)}"
    marks.append(mark)
    if isinstance(node, str):
        return re.sub(r"^\d+|\{\}|^[^{]*$", mark, node)
    return int(mark) if is_number else {mark: "1"}


def test_each_value_reaches_an_object() -> None:
    marks: list[str] = []
    marked = _marked("", yaml.safe_load((CHART / "values.yaml").read_text()), marks)
    theirs = {"postgresql": {"enabled": False}, "ray": {"redis": {"address": "store:1"}}}
    without = ({"ingress": {"enabled": False}}, theirs | {"gateway": {"enabled": False}})
    found = str([objects_of(merged(marked, each)) for each in without])
    assert len(marks) > 90
    assert [mark for mark in marks if mark not in found] == []


def test_the_chart_takes_the_settings_that_there_are() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    (pattern,) = schema["properties"]["service"]["properties"]["settings"]["patternProperties"]
    read_elsewhere = {"STORAGE_RETRY_S", "STORAGE_TIMEOUT_S"}
    names = sorted({name.upper() for name in Settings.model_fields} | read_elsewhere)
    wanted = f"^SHARDLOOM_({'|'.join(names)})$"
    assert pattern == wanted, f"paste into k8s/chart/values.schema.json:\n{wanted}"


@every_variant
def test_service_and_ray_share_run_storage_and_the_token(variant: str) -> None:
    is_shared = settings_of(variant).get("SHARDLOOM_RUNS_SHARED") != "false"
    for pod in pods(variant):
        if pod.component not in ("service", "ray-head", "ray-worker"):
            continue
        claims = {
            mount["mountPath"]: volume["persistentVolumeClaim"]["claimName"]
            for mount in pod.containers[0]["volumeMounts"]
            for volume in pod.spec["volumes"]
            if volume["name"] == mount["name"] and "persistentVolumeClaim" in volume
        }
        whose = "their" if "theirs" in variant else "shardloom"
        data = {} if variant.startswith("bucket") else {"/var/lib/shardloom/data": f"{whose}-data"}
        runs = settings_of(variant)["SHARDLOOM_RUNS_DIR"]
        if is_shared or pod.component == "service":
            claim = f"{whose}-runs" if is_shared else "shardloom-service-runs"
            assert claims == {runs: claim, **data}
        else:
            assert claims == data
            assert runs in {each["mountPath"] for each in pod.containers[0]["volumeMounts"]}
        user = pod.spec["securityContext"]
        assert (user["runAsUser"], user["fsGroup"]) == (1000, 1000), "files are of one user"
    (container,) = pods(variant, "service")[0].containers
    (token,) = [each for each in container["env"] if each["name"] == "SHARDLOOM_RAY_AUTH_TOKEN"]
    auth = ray_cluster(variant)["spec"]["authOptions"]
    # KubeRay wants the key of that name.
    wanted = {"name": auth["secretName"], "key": "auth_token"}
    assert (auth["mode"], token["valueFrom"]["secretKeyRef"]) == ("token", wanted)


# ---- references


@every_variant
def test_everything_that_is_referred_to_is_there(variant: str) -> None:
    manifests = build(variant)
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    for pod in pods_of(manifests):
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        if pod.kind == "StatefulSet":
            volumes.add("data")
        for container in pod.containers:
            assert {each["name"] for each in container["volumeMounts"]} <= volumes, pod.owner
            assert len({each["name"] for each in container.get("env", [])}) == len(
                container.get("env", [])
            ), pod.owner
        account = pod.spec.get("serviceAccountName")
        assert account is None or ("ServiceAccount", account) in names
    claims = _references(manifests, "persistentVolumeClaim")
    assert len(claims) >= (1 if variant.startswith("bucket") else 3)
    made = [claim["claimName"] for claim in claims if "theirs" not in variant]
    assert all(("PersistentVolumeClaim", name) in names for name in made)
    # Many classes bind a volume to its first pod, and `helm --wait` waits for that.
    at_once = [pod.spec for pod in pods_of(manifests) if pod.kind != "CronJob"]
    mounted = {claim["claimName"] for claim in _references(at_once, "persistentVolumeClaim")}
    assert {name for kind, name in names if kind == "PersistentVolumeClaim"} <= mounted
    (config,) = _references(manifests, "configMapRef")
    assert ("ConfigMap", config["name"]) in names
    for backend in _references(of_kind(manifests, "Ingress"), "backend"):
        assert ("Service", backend["service"]["name"]) in names


@every_variant
def test_secrets_that_are_referred_to_are_made_by_the_hook_or_brought(variant: str) -> None:
    manifests = (*build(variant), ray_cluster(variant))
    found = _references(manifests, "secretKeyRef") + _references(manifests, "credentials")
    made = {
        (name, key)
        for part, name in (
            each.split("=") for each in pods(variant, "secrets")[0].containers[0]["args"]
        )
        for key in PARTS[part]()
    }
    brought = {_BROUGHT, *([("shardloom-redis", "password")] if "theirs" in variant else [])}
    for reference in found:
        assert (reference["name"], reference["key"]) in made | brought
    named = {(each["name"], each["key"]) for each in found}
    assert made <= named, "no more than somebody wants"
    whole = {each["name"]: each["optional"] for each in _references(manifests, "secretRef")}
    assert whole == {"shardloom-object-store": True}


def test_monitors_find_what_they_watch() -> None:
    manifests = build(FULL)
    assert len([m for m in manifests if "grafana_dashboard" in m["metadata"]["labels"]]) == 2
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    service = one(manifests, "Service", "shardloom")
    assert selects(monitor["spec"]["selector"], service["metadata"]["labels"])
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    (monitor,) = of_kind(manifests, "PodMonitor")
    for pod in (*pods(FULL, "ray-head"), *pods(FULL, "ray-worker")):
        assert selects(monitor["spec"]["selector"], pod.labels)
        ports = [port["name"] for port in pod.containers[0]["ports"]]
        assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    assert not selects(monitor["spec"]["selector"], pods(FULL, "service")[0].labels)


# ---- Ray


@every_variant
def test_code_of_jobs_sees_none_of_the_services_secrets(variant: str) -> None:
    ray = [each for each in pods(variant) if each.component.startswith("ray-")]
    assert ray
    for pod in ray:
        variables = [each for found in _references(pod.spec, "env") for each in found]
        named = {each["name"] for each in variables}
        assert {name for name in named if name.startswith("SHARDLOOM_")} <= TRAINER_SETTINGS
        text = str(pod.spec)
        assert not [name for name in ("shardloom-database", "shardloom-service") if name in text]


@cache
def _options_of(command: str) -> set[str]:
    """Options of a command of `ray`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray Serve's about itself, which comes along
        from ray.scripts import scripts
    return {option for each in getattr(scripts, command).params for option in each.opts}


@every_variant
def test_ray_is_of_our_version_knows_its_parameters_and_scales_by_itself(variant: str) -> None:
    spec, options = ray_cluster(variant)["spec"], _options_of("start")
    wanted = PROJECT["optional-dependencies"]["trainer-gpu"]
    assert f"ray[default,train]=={spec['rayVersion']}" in wanted
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"]["version"] == "v2"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    # With another image all pods are made anew: jobs go on from their checkpoints.
    assert spec["upgradeStrategy"] == {"type": "Recreate"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for name, value in group["rayStartParams"].items():
            assert f"--{name}" in options and isinstance(value, str)
    for group in spec["workerGroupSpecs"]:
        # `replicas` is left to the autoscaler: an upgrade would set it back.
        assert 0 <= group["minReplicas"] <= group["maxReplicas"] and "replicas" not in group
        # Autoscaler v2 makes a new pod, and has KubeRay set this to Never.
        assert "restartPolicy" not in group["template"]["spec"]


@every_variant
def test_workers_drain_before_they_are_killed(variant: str) -> None:
    from ray.core.generated import autoscaler_pb2

    options = _options_of("drain_node")
    for pod in pods(variant, "ray-worker"):
        (script,) = pod.containers[0]["lifecycle"]["preStop"]["exec"]["command"][2:]
        assert set(re.findall(r"--[a-z-]+", script)) <= options
        found = re.fullmatch(
            r"timeout -s KILL (\d+) ray drain-node --reason (\w+) "
            r"--reason-message \"[^\"]+\" --deadline-remaining-seconds (\d+) && sleep (\d+)",
            script,
        )
        assert found is not None, script
        autoscaler_pb2.DrainNodeReason.Value(found[2])  # raises for a reason that Ray lacks
        grace_s = pod.spec["terminationGracePeriodSeconds"]
        assert int(found[1]) + int(found[4]) < grace_s and found[3] == found[4]
        # Where the hook fails, Ray's own drain on SIGTERM has its turn; without a head that ask for
        # each of them is in vain.
        variables = {each["name"]: each["value"] for each in pod.containers[0]["env"]}
        again_s = float(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert again_s > 0 and int(found[1]) + again_s < 60


def test_clusters_of_jobs_own_are_made_after_the_shared_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = _settings(FULL, monkeypatch)
    assert settings.backend == "kuberay" and settings.kuberay_namespace == "shardloom"
    assert settings.kuberay_namespaces == {}
    isolated = _settings("gpu+isolated", monkeypatch).kuberay_namespaces
    assert isolated == {"ads": "ads-training", "maps": "maps-training"}
    template = template_of(FULL)
    assert template == ray_cluster(FULL)
    assert settings.kuberay_template_file.name == "raycluster.yaml"
    # Heads of either kind: the service reaches them, and they it, by the labels of their pods.
    labels = template["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "ray-head"
    (container,) = pods(FULL, "service")[0].containers
    mounts = [each["mountPath"] for each in container["volumeMounts"]]
    # Where the official client looks for it.
    assert "/var/run/secrets/kubernetes.io/serviceaccount" in mounts


# ---- where a host and a head lie


def test_with_a_bucket_no_volume_is_shared() -> None:
    assert settings_of("bucket")["SHARDLOOM_CHECKPOINT_ROOT"] == "s3://ads/checkpoints"
    assert "SHARDLOOM_CHECKPOINT_ROOT" not in settings_of("gpu")
    (runs,) = of_kind(build("bucket"), "PersistentVolumeClaim")
    assert runs["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "ReadWriteMany" not in str(build("bucket"))
    service = one(build("bucket"), "Deployment", "shardloom")["spec"]
    assert (service["replicas"], service["strategy"]) == (1, {"type": "Recreate"})
    for account in of_kind(build("bucket"), "ServiceAccount"):
        role = account["metadata"]["annotations"].get("eks.amazonaws.com/role-arn")
        assert role or account["metadata"]["name"] == "shardloom-secrets"


def test_data_is_open_for_writing_to_who_prepares_it_alone() -> None:
    for pod in pods("gpu"):
        for container in pod.containers:
            mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
            data = mounts.get("/var/lib/shardloom/data")
            assert data is None or data.get("readOnly", False) == (pod.component != "data")
    assert "/var/lib/shardloom/data" not in str(pods("bucket", "data")[0].spec)
    (job,) = of_kind(build("gpu"), "CronJob")
    assert job["spec"]["suspend"] is True


def test_the_database_is_migrated_before_the_chart_s_objects_are_there() -> None:
    migrate = one(build("gpu"), "Job", "shardloom-migrate-0-1-0")
    assert migrate["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    pod = migrate["spec"]["template"]["spec"]
    # Argo CD runs it before anything of the chart: it may need Secrets alone.
    assert "serviceAccountName" not in pod
    assert {next(iter(set(each) - {"name"})) for each in pod["volumes"]} == {"emptyDir"}
    assert not _references(pod, "configMapRef")
    assert not pods("dev", "migrate"), "the chart's own PostgreSQL is not there yet"


def test_the_state_of_heads_lies_in_redis_or_on_a_volume_of_its_own_class() -> None:
    options = ray_cluster("gpu")["spec"]["gcsFaultToleranceOptions"]
    assert options["backend"] == "redis", "RocksDB wants an alpha feature gate of KubeRay"
    (service,) = [
        each["metadata"]["name"]
        for each in of_kind(build("gpu"), "Service")
        if selects({"matchLabels": each["spec"]["selector"]}, pods("gpu", "redis")[0].labels)
    ]
    assert options["redisAddress"] == f"{service}.shardloom.svc:6379"
    theirs = ray_cluster("gpu+theirs")["spec"]["gcsFaultToleranceOptions"]
    assert theirs["redisAddress"] == "rediss://redis.example:6379"
    assert not pods("gpu+theirs", "redis")
    storage = ray_cluster("gpu+embedded")["spec"]["gcsFaultToleranceOptions"]["storage"]
    assert (storage["storageClassName"], storage["accessModes"]) == ("ssd", ["ReadWriteOnce"])


def test_volumes_are_given_to_the_user_of_the_pods_where_the_driver_does_not() -> None:
    assert not pods("gpu", "owner")
    (pod,) = pods("gpu+owner", "owner")
    (container,) = pod.containers
    # A Job cannot be changed: with another image it is another Job.
    later = objects_of(merged(values("gpu+owner"), {"images": {"service": {"tag": "2"}}}))
    assert pod.owner not in [each.owner for each in pods_of(later)]
    script = container["command"][-1].split("\n")
    assert script[:2] == ["chown 1000:1000 /runs /data", "chown 999:999 /backup"]
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"/runs", "/data", "/backup"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}


def test_streams_stay_open_and_a_gateway_that_knows_no_timeouts_takes_the_route() -> None:
    asked = merged(values("gpu+theirs"), {"gateway": {"requestTimeout": "0s"}})
    for manifests, timeouts in (
        (build("gpu+theirs"), None),
        (objects_of(asked), {"request": "0s"}),
    ):
        (route,) = of_kind(manifests, "HTTPRoute")
        assert route["spec"]["rules"][0].get("timeouts") == timeouts


def test_traefik_leaves_a_browser_at_the_replica_that_has_its_page() -> None:
    (ingress,) = of_kind(build("gpu"), "Ingress")
    assert ingress["spec"]["ingressClassName"] == "traefik"
    service = one(build("gpu"), "Service", "shardloom")
    sticky = "traefik.ingress.kubernetes.io/service.sticky.cookie"
    assert service["metadata"]["annotations"] == {sticky: "true"}


@pytest.mark.parametrize("is_made", [True, False])
def test_an_install_tells_of_the_administrator_s_key_where_the_chart_makes_it(
    is_made: bool,
) -> None:
    asked = merged(values("gpu"), {"secrets": {"generate": is_made}})
    with helm_python.Chart.load(chart()) as loaded:
        notes = loaded.render(asked)["shardloom/templates/NOTES.txt"]
    assert ("get secret shardloom-first-key" in notes) is is_made
    assert notes.startswith("Shardloom")


def test_where_no_operator_is_nothing_of_it_is_asked_for() -> None:
    kinds = {each["kind"] for each in build("dev")}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Ingress", "HTTPRoute"}
    assert not kinds & {"Queue", "ClusterQueue"}
