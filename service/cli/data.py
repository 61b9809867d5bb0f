"""`shardloom data`: the trainer's own commands, and `prepare --on cluster` as a Job in Kubernetes.

The Job is a copy of the CronJob that the chart makes (image, volumes, rights, resources), with the
arguments of the command. It outlives the CLI: the same command finds it while it runs, and
`shardloom data prepare --on cluster --job NAME` shows the log of one that has ended.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from service.cli.common import (
    DETACHED,
    JOB_FAILED,
    REFUSED,
    UNAVAILABLE,
    describe,
    error_console,
    print_hint,
)
from service.errors import BackendUnreachable
from trainer.errors import EXIT_BAD_DATA

if TYPE_CHECKING:
    from service.backends.kuberay.client import KubeApi

TEMPLATE = "shardloom-data"
WORK = "shardloom.io/data"
_DATA_FOLDER = "/var/lib/shardloom/data"
_TIMEOUT_S = 10.0
_POLL_S = 1.0
# Without an answer for so long, following ends; the Job does not.
_PATIENCE_S = 120.0


def data(context: typer.Context) -> None:
    """Prepare and generate training data."""
    if on_cluster := cluster_command(context.args):
        run(on_cluster)
        return
    # By its name: what it needs is no part of a client, nor of the service.
    commands = import_module("trainer.datasets.cli").app
    commands(args=context.args, prog_name="shardloom data")


@dataclass(frozen=True)
class ClusterCommand:
    """A `shardloom data` command for the cluster: its own arguments, and the chart's namespace.

    With `job` it follows the Job of that name.
    """

    arguments: list[str]
    namespace: str
    job: str = ""


def cluster_command(arguments: Sequence[str]) -> ClusterCommand | None:
    """What `shardloom data ARGUMENTS` asks of the cluster; None where it is for this machine.

    Raises `typer.BadParameter`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--on")
    parser.add_argument("--namespace")
    parser.add_argument("--job", default="")
    try:
        given, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    if given.on != "cluster" or rest[:1] != ["prepare"] or "--help" in rest:
        return None
    for each in rest[2:]:
        if not each.startswith(("-", _DATA_FOLDER)) and "://" not in each and Path(each).exists():
            raise typer.BadParameter(
                f"{each!r} is on this machine; on the cluster name a URL (s3://, gs://) or a path "
                f"below {_DATA_FOLDER}"
            )
    namespace = given.namespace or os.environ.get("SHARDLOOM_KUBERAY_NAMESPACE") or "shardloom"
    return ClusterCommand(rest, namespace, given.job)


def run(command: ClusterCommand) -> None:
    """Start the Job, or find it, and follow it; raises `typer.Exit` unless it succeeds."""
    # Imported here because the client of Kubernetes is large, and an extra.
    from service.backends.kuberay.client import KubeApi, KubeRefused

    name = ""
    try:
        api = KubeApi.open(_kubeconfig(), command.namespace, _TIMEOUT_S)
        name = command.job or _start(api, command)
        reason = _follow(api, name)
    except KeyboardInterrupt:
        if not name:
            raise
        print_hint(f"the Job {name} goes on; the same command follows it again")
        raise typer.Exit(DETACHED) from None
    except (BackendUnreachable, KubeRefused) as error:
        error_console().print(describe(error))
        raise typer.Exit(REFUSED if isinstance(error, KubeRefused) else UNAVAILABLE) from None
    if reason:
        error_console().print(describe(RuntimeError(f"the Job {name} failed: {reason}")))
        raise typer.Exit(JOB_FAILED)


def _kubeconfig() -> Path | None:
    """The user's; None in a pod that has none."""
    if named := os.environ.get("KUBECONFIG"):
        return Path(named)
    path = Path("~/.kube/config").expanduser()
    return path if path.exists() or "KUBERNETES_SERVICE_HOST" not in os.environ else None


def _start(api: KubeApi, command: ClusterCommand) -> str:
    """The name of the Job of a command: of one that has not ended, or a new one."""
    from service.backends.kuberay.client import CRONJOBS, JOBS, KubeRefused

    work = hashlib.sha256("\0".join(command.arguments).encode()).hexdigest()[:32]
    for job in api.list(JOBS, labelSelector=f"{WORK}={work}")["items"]:
        if not _ended(job):
            name = str(job["metadata"]["name"])
            print_hint(f"the Job {name} does this already")
            return name
    try:
        template = api.get(CRONJOBS, TEMPLATE)
    except KubeRefused as error:
        if not error.is_missing:
            raise
        raise BackendUnreachable(
            f"no CronJob {TEMPLATE} in namespace {command.namespace} to make the Job after: is the "
            "chart installed there? --namespace names another one"
        ) from error
    job = job_of(template, command, work)
    api.create(JOBS, job)
    print_hint(f"started the Job {job['metadata']['name']} in namespace {command.namespace}")
    return str(job["metadata"]["name"])


def job_of(template: dict[str, Any], command: ClusterCommand, work: str) -> dict[str, Any]:
    """The Job of a command, from the chart's CronJob."""
    whole = template["spec"]["jobTemplate"]
    spec = whole["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    pod = {**pod, "containers": [{**container, "args": command.arguments}]}
    codes = {"containerName": container["name"], "operator": "In", "values": [EXIT_BAD_DATA]}
    rules = [
        {"action": "FailJob", "onExitCodes": codes},
        # A machine that went away is nobody's fault.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    labels = {**whole.get("metadata", {}).get("labels", {}), WORK: work}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{TEMPLATE}-{secrets.token_hex(4)}",
            "labels": labels,
            "annotations": {"shardloom.io/arguments": " ".join(command.arguments)},
        },
        "spec": {
            **spec,
            "podFailurePolicy": {"rules": rules},
            "template": {**spec["template"], "spec": pod},
        },
    }


def _ended(job: dict[str, Any]) -> dict[str, Any] | None:
    """The condition that a Job ended with, if it has."""
    conditions = (job.get("status") or {}).get("conditions") or []
    ends = [each for each in conditions if each["type"] in ("Complete", "Failed")]
    return next((each for each in ends if each["status"] == "True"), None)


def _follow(api: KubeApi, name: str) -> str:
    """Print the logs of a Job's pods until it ends; why it failed, empty if it did not.

    Raises `BackendUnreachable` where nobody answers for `_PATIENCE_S`.
    """
    from service.backends.kuberay.client import JOBS, PODS
    from service.backends.kuberay.status import pod_problem_in

    told: dict[str, str] = {}
    last_problem, answered_at = "", time.monotonic()
    while True:
        try:
            job = api.get(JOBS, name)
            answered_at = time.monotonic()
            pods = api.list(PODS, labelSelector=f"batch.kubernetes.io/job-name={name}")["items"]
            pods.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
            for pod in pods:
                pod_name = str(pod["metadata"]["name"])
                if (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed"):
                    for told_at, line in api.log(pod_name, told.get(pod_name, "")):
                        told[pod_name], answered_at = told_at, time.monotonic()
                        typer.echo(line)
            end = _ended(job)
            if end is not None:
                return "" if end["type"] == "Complete" else _failure(end, pods)
            problem = pod_problem_in(pods)
            if problem and problem != last_problem:
                print_hint(f"waiting: {problem}")
            last_problem = problem
        except BackendUnreachable:
            if time.monotonic() - answered_at > _PATIENCE_S:
                raise
        time.sleep(_POLL_S)


def _failure(end: dict[str, Any], pods: list[dict[str, Any]]) -> str:
    """Why a Job failed: the last words of its last pod, else what Kubernetes says."""
    reasons = [str(end.get("message") or end.get("reason") or "no reason is given")]
    for pod in pods:
        for state in (pod.get("status") or {}).get("containerStatuses") or []:
            ended = (state.get("state") or {}).get("terminated") or {}
            said = str(ended.get("message") or "").strip()
            if ended.get("exitCode"):
                reasons.append(said.splitlines()[-1] if said else str(ended.get("reason")))
    return reasons[-1]
