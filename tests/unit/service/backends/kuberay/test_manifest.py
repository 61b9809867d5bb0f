"""What a job with a cluster of its own is to Kubernetes: valid, sized for it, and told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.backends.kuberay.manifest import (
    attempt_of,
    is_submitted,
    label_value,
    name_of,
    rayjob_of,
    release_of,
    secret_name_of,
    secret_of,
    size_of,
)
from service.errors import SubmissionRefused
from tests.harness.kube.objects import built_in_validator, crd_validator
from tests.harness.kuberay import ATTEMPT, OPTIONS, group, spec_of, submission, template
from tests.unit.k8s.rendering import every_variant, ray_cluster


def _made(manifest: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return rayjob_of(submission(**changes), manifest or template(), OPTIONS)


def _bounds(rayjob: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    return {
        each["groupName"]: (each["minReplicas"], each["replicas"], each["maxReplicas"])
        for each in rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    }


# ---- valid


@every_variant
def test_examples_give_rayjobs_that_are_valid(variant: str) -> None:
    device = "cpu" if variant.startswith("dev") else "cuda"
    sent = submission(min_workers=4, max_workers=8, device=device, queue="ads", deadline_s=60)
    made = rayjob_of(sent, ray_cluster(variant), OPTIONS)
    crd_validator("rayjobs.ray.io", "v1").validate(made)
    made["metadata"]["uid"] = "1-2-3"
    built_in_validator("v1", "Secret", "1.32").validate(secret_of(sent, made, OPTIONS))


def test_kuberay_retries_nothing_and_takes_the_cluster_down() -> None:
    spec = _made(deadline_s=7)["spec"]
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (0, True)
    assert (spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"]) == (60, 7)
    assert "activeDeadlineSeconds" not in _made()["spec"]
    assert spec["jobId"] == ATTEMPT and spec["entrypoint"] == "python -m trainer.driver"


def test_what_belongs_to_the_shared_cluster_alone_is_left_behind() -> None:
    manifest = template()
    manifest["spec"] |= {"suspend": True, "managedBy": "somebody"}
    manifest["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {"workersToDelete": ["pod"]}
    before = json.dumps(manifest)
    spec = _made(manifest)["spec"]["rayClusterSpec"]
    assert not {"suspend", "managedBy"} & set(spec)
    assert "scaleStrategy" not in spec["workerGroupSpecs"][0]
    assert json.dumps(manifest) == before, "the template itself stays as it is"


# ---- secrets


def test_tokens_are_in_the_secret_and_nowhere_else() -> None:
    sent, made = submission(), _made()
    assert "a secret" not in json.dumps(made)
    made["metadata"]["uid"] = "u"
    secret = secret_of(sent, made, OPTIONS)
    other = rayjob_of(sent, template(), OPTIONS, "1")
    assert secret_name_of(other) != secret_name_of(made), "no Secret of an earlier RayJob is met"
    assert secret["stringData"] == sent.env
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("RayJob", ATTEMPT, "u")
    spec = made["spec"]["rayClusterSpec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for pod in pods:
        *_, last = pod["template"]["spec"]["containers"][0]["envFrom"]
        assert last == {"secretRef": {"name": secret["metadata"]["name"]}}
        assert pod["template"]["metadata"]["labels"]["shardloom.io/job"] == sent.job_id


def test_a_cluster_of_an_isolated_project_shares_nothing_with_those_of_others() -> None:
    options = replace(OPTIONS, namespace="ads-training", ray_token_of="Ray of {}".format)
    sent = submission()
    made = rayjob_of(sent, template(), options)
    crd_validator("rayjobs.ray.io", "v1").validate(made)
    assert made["metadata"]["namespace"] == "ads-training"
    spec = made["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token", "secretName": secret_name_of(made)}
    made["metadata"]["uid"] = "u"
    secret = secret_of(sent, made, options)
    assert secret["metadata"]["namespace"] == "ads-training"
    assert secret["stringData"] == sent.env | {"auth_token": f"Ray of {ATTEMPT}"}
    for pod in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        (container,) = pod["template"]["spec"]["containers"]
        runs = [each for each in container["volumeMounts"] if each["name"] == "runs"]
        folder = sent.env["SHARDLOOM_RUN_DIR"]
        assert runs == [{"name": "runs", "mountPath": folder, "subPath": sent.job_id}]


def test_a_template_whose_run_storage_is_on_no_volume_isolates_nothing_and_is_refused() -> None:
    bare = template(group("cpu", "4"))
    with pytest.raises(SubmissionRefused, match="no volume of the cluster template"):
        rayjob_of(submission(), bare, replace(OPTIONS, ray_token_of=str))


def test_a_template_in_a_volcano_queue_gives_jobs_the_same_queue() -> None:
    queued = template()
    queued.setdefault("metadata", {})["labels"] = {"volcano.sh/queue-name": "shardloom"}
    made = rayjob_of(submission(), queued, OPTIONS)
    assert made["metadata"]["labels"]["volcano.sh/queue-name"] == "shardloom"
    assert "volcano.sh/queue-name" not in _made()["metadata"]["labels"]


@pytest.mark.parametrize("variant", ["gpu", "gpu+embedded", "dev"])
def test_a_head_is_not_made_again_and_keeps_no_state_that_its_deletion_waits_for(
    variant: str,
) -> None:
    made = rayjob_of(submission(device="auto"), ray_cluster(variant), OPTIONS)
    spec = made["spec"]["rayClusterSpec"]
    assert made["metadata"]["annotations"]["ray.io/disable-provisioned-head-restart"] == "true"
    assert spec["headGroupSpec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert "gcsFaultToleranceOptions" not in spec


# ---- let go


def test_a_rayjob_waits_until_its_secret_is_there() -> None:
    made = _made()
    assert made["spec"]["suspend"] and not is_submitted(made)
    change = release_of(made)
    assert change["spec"] == {"suspend": False}
    assert is_submitted({"metadata": change["metadata"]})


def test_kueue_lets_its_jobs_go_itself() -> None:
    made = _made(queue="ads", min_workers=8, max_workers=8)
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "ads"
    assert "spec" not in release_of(made)
    assert "kueue.x-k8s.io/elastic-job" not in made["metadata"]["annotations"]
    grows = _made(queue="ads", min_workers=8, max_workers=16)
    assert grows["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"
    usual = rayjob_of(submission(), template(), replace(OPTIONS, queue="usual"))
    assert usual["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "usual"
    assert "kueue.x-k8s.io/queue-name" not in _made()["metadata"]["labels"]


# ---- names


@given(st.text(min_size=1, max_size=80))
def test_any_attempt_has_a_name_and_labels_that_kubernetes_takes(text: str) -> None:
    made = rayjob_of(
        replace(submission(project=text), attempt_id=text, job_id=text), template(), OPTIONS
    )
    name = made["metadata"]["name"]
    assert name == name_of(text) and len(name) <= 47
    assert name[0].isalpha() and name.isascii() and name.replace("-", "a").isalnum()
    for value in made["metadata"]["labels"].values():
        assert 0 < len(value) <= 63 and value == label_value(value)
    assert attempt_of(made) == text
    del made["metadata"]["labels"]
    assert attempt_of(made) is None, "somebody else's"


# ---- sizes


def test_pods_are_as_many_as_the_workers_fill() -> None:
    cases: list[tuple[dict[str, Any], dict[str, tuple[int, int, int]]]] = [
        ({"min_workers": 8, "max_workers": 8}, {"gpu": (1, 1, 1)}),
        ({"min_workers": 9, "max_workers": 9}, {"gpu": (2, 2, 2)}),
        ({"min_workers": 8, "max_workers": 24}, {"gpu": (1, 1, 3), "gpu-spot": (0, 0, 2)}),
        ({"min_workers": 2, "max_workers": 2, "num_hosts": 2}, {"gpu": (2, 2, 2)}),
        # 8 GPUs hold one group of 5 where groups must not be split over hosts.
        (
            {"min_workers": 10, "max_workers": 10, "group_size": 5, "num_hosts": 2},
            {"gpu": (2, 2, 2)},
        ),
        ({"min_workers": 48, "max_workers": 48, "device": "cpu"}, {"gpu": (1, 1, 1)}),
    ]
    for wanted, bounds in cases:
        assert _bounds(_made(**wanted)) == bounds, wanted


def test_the_autoscaler_comes_along_where_there_is_something_to_scale() -> None:
    fixed = _made(min_workers=8, max_workers=8)["spec"]["rayClusterSpec"]
    assert not fixed["enableInTreeAutoscaling"] and "autoscalerOptions" not in fixed
    elastic = _made(min_workers=8, max_workers=16)["spec"]["rayClusterSpec"]
    assert elastic["enableInTreeAutoscaling"]
    assert elastic["autoscalerOptions"]["version"] == "v2"


def test_workers_without_gpus_take_groups_that_hold_them_and_leave_gpus_to_others() -> None:
    manifest = template(group("small", "2"), group("large", "16"))
    made = _made(manifest, min_workers=4, max_workers=8, cpus_per_worker=4.0)
    assert _bounds(made) == {"large": (1, 1, 2)}
    manifest = template(group("gpu", "48", 8), group("cpu", "16"))
    wanted = {"min_workers": 16, "max_workers": 16}
    assert _bounds(_made(manifest, device="cpu", **wanted)) == {"cpu": (1, 1, 1)}
    assert _bounds(_made(manifest, device="auto", **wanted)) == {"gpu": (2, 2, 2)}
    sliced = group("mig", "48")
    container = sliced["template"]["spec"]["containers"][0]
    container["resources"]["limits"]["nvidia.com/mig-2g.20gb"] = "4"
    pairs = {**group("pairs", "48", 4), "numOfHosts": 2}
    made = _made(template(sliced, pairs), device="cuda", min_workers=4, max_workers=8)
    assert _bounds(made) == {"mig": (1, 1, 2)}, "a replica of the other is two pods"


def test_a_group_or_a_template_that_cannot_be_used_is_refused() -> None:
    for group_of in (
        {"rayStartParams": {"num-cpus": "auto"}},
        {"template": None},
        {"numOfHosts": 2},
    ):
        with pytest.raises(SubmissionRefused, match="template"):
            size_of(spec_of(), [{**group("cpu", "16"), **group_of}])
    bare = template()
    bare["spec"]["headGroupSpec"]["template"]["metadata"] = None
    broken: list[dict[str, Any]] = [{}, {"spec": {}}, {"spec": {"workerGroupSpecs": [{}]}}, bare]
    broken.append({**template(), "metadata": "ray"})
    for manifest in broken:
        with pytest.raises(SubmissionRefused, match="template"):
            rayjob_of(submission(), manifest, OPTIONS)


def test_a_worker_that_fits_no_pod_is_refused_with_what_to_change() -> None:
    for wanted in ({"cpus_per_worker": 100.0}, {"device": "cuda"}):
        with pytest.raises(SubmissionRefused, match=r"pods?.*cpu: 4 CPU\(s\), 0 GPU\(s\).*lower"):
            _made(template(group("cpu", "4")), **wanted)


@given(
    least=st.integers(1, 64),
    more=st.integers(0, 64),
    num_hosts=st.integers(1, 4),
    size=st.none() | st.integers(1, 8),
    cpus=st.floats(0.1, 8),
    gpus=st.integers(0, 8),
)
def test_the_pods_hold_all_workers_and_no_pod_is_wanted_for_nothing(
    least: int, more: int, num_hosts: int, size: int | None, cpus: float, gpus: int
) -> None:
    wanted = spec_of(
        min_workers=least,
        max_workers=least + more,
        num_hosts=num_hosts,
        group_size=size,
        cpus_per_worker=cpus,
    )
    found = size_of(wanted, [group("one", "8", gpus)])
    fitting = found.num_fitting
    assert fitting * cpus <= 8.001 and (not gpus or fitting <= gpus)
    assert found.min_pods * fitting >= least and found.max_pods * fitting >= least + more
    assert num_hosts <= found.min_pods <= found.max_pods
    for pods, workers in ((found.min_pods, least), (found.max_pods, least + more)):
        assert pods == num_hosts or pods == found.min_pods or (pods - 1) * fitting < workers
