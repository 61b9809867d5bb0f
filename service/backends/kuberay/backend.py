"""Runs attempts on Kubernetes: on the shared Ray cluster, or on clusters of their own (KubeRay).

Shared jobs go through Ray's Jobs API (`service.backends.ray_jobs`). A job with `cluster: own` is a
RayJob, whose operator makes the cluster, starts the driver and takes the cluster down. Nothing is
remembered here that cannot be found again: a RayJob by its name, the rest by asking Ray. KubeRay
leaves the RayJob of a job that has ended; it is deleted later, so that its end is seen even by a
service that was away for long.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from service.backends.base import Backend, Submission
from service.backends.kuberay.client import RAYJOBS, SECRETS, KubeApi, KubeRefused
from service.backends.kuberay.manifest import (
    LET_GO,
    ClusterOptions,
    Manifest,
    attempt_of,
    hosts_of,
    is_submitted,
    name_of,
    rayjob_of,
    release_of,
    secret_of,
    size_of,
    was_let_go,
)
from service.backends.kuberay.status import (
    going_since,
    is_cut_off,
    is_evicted,
    is_given_up,
    is_over,
    is_pending,
    is_suspended,
    observation_of,
    unix_s,
)
from service.backends.kuberay.watch import PodProblems, RayJobWatch, Remembered
from service.backends.ray_jobs import RayJobsBackend
from service.domain.models import Observation, ObservedState
from service.errors import BackendUnreachable, SubmissionRefused
from trainer.layout.hosts import HostFacts
from trainer.spec.job import JobSpec

logger = logging.getLogger(__name__)

# ---- garbage collection

KEEP_ENDED_S = 24 * 3600.0
# A submission is tried again within half a minute; one that is not has no job any more. One that
# is, and cannot be carried through, makes it again.
KEEP_CUT_OFF_S = 900.0


def is_garbage(rayjob: Mapping[str, Any], now: float) -> bool:
    """Whether a RayJob of ours has ended long ago, or was never submitted to the end."""
    if attempt_of(rayjob) is None or "deletionTimestamp" in rayjob["metadata"]:
        return False
    created_at = unix_s(rayjob["metadata"]["creationTimestamp"])
    if is_over(rayjob):
        ended = (rayjob.get("status") or {}).get("endTime")
        return now - (unix_s(ended) if ended else created_at) > KEEP_ENDED_S
    return is_cut_off(rayjob) and now - created_at > KEEP_CUT_OFF_S


# ---- cluster template


def template_in(path: Path) -> Manifest:
    """The first RayCluster in a YAML file; a mounted ConfigMap changes under us."""
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BackendUnreachable(
            f"cannot read the cluster template {path} ({error}); "
            "SHARDLOOM_KUBERAY_TEMPLATE_FILE names it"
        ) from error
    for document in documents:
        if isinstance(document, dict) and document.get("kind") == "RayCluster":
            spec = document.get("spec")
            if isinstance(spec, dict) and isinstance(spec.get("workerGroupSpecs"), list):
                return document
    raise BackendUnreachable(
        f"{path} has no RayCluster with workerGroupSpecs; see k8s/chart/templates/raycluster.yaml"
    )


# ---- the backend

STOP_FAILED_AT = "shardloom.io/stop-failed-at"
# A head that cannot be asked to stop its driver for this long goes with its cluster.
STOP_GRACE_S = 30.0
# Pods have this long to go (a worker's preStop alone 150 s) before an attempt ends without them.
TAKE_DOWN_S = 300.0


class KubeRayBackend(Backend):
    """A namespace of Kubernetes with KubeRay, and the Ray cluster there that jobs share (if any).

    `template` reads the RayCluster that others are made like, and `open_head` gives the Jobs API
    behind an address, for their heads, with the token of their Ray (None: that of the settings).
    """

    name = "kuberay"
    makes_clusters = True

    def __init__(
        self,
        api: KubeApi,
        shared: RayJobsBackend | None,
        template: Callable[[], Manifest],
        options: ClusterOptions,
        open_head: Callable[[str, str | None], RayJobsBackend],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.address = f"{api.address} (namespace {options.namespace})"
        self._api = api
        self._shared = shared
        self._template = template
        self._options = options
        self._open_head = open_head
        self._clock = clock
        self._pod_problems = PodProblems(api, clock)
        self._watch = RayJobWatch(api, self._sweep)
        # Where attempts are, so that one cluster is asked and not two: a cache, never the truth.
        self._is_own = Remembered[bool]()
        # How attempts ended whose RayJobs we deleted, for the poll that finds them gone.
        self._endings = Remembered[Observation]()

    def start(self) -> None:
        """Begin to watch RayJobs; without, every poll asks for its own."""
        self._watch.start()

    def close(self) -> None:
        self._watch.close()
        self._api.close()
        if self._shared is not None:
            self._shared.close()

    # ---- submit

    def submit(self, submission: Submission) -> None:
        """Start an attempt where its job wants to run; a known id is accepted without effect."""
        is_own = submission.spec.resources.cluster == "own"
        self._is_own[submission.attempt_id] = is_own
        if not is_own:
            if self._shared is None:
                raise SubmissionRefused(
                    "there is no shared cluster (SHARDLOOM_RAY_ADDRESS is empty), or none for this "
                    "project; set resources.cluster to own"
                )
            self._shared.submit(submission)
            return
        rayjob = self._create_rayjob(submission)
        if is_submitted(rayjob):
            return
        try:
            self._api.create_new(SECRETS, secret_of(submission, rayjob, self._options))
            self._api.patch(RAYJOBS, rayjob["metadata"]["name"], release_of(rayjob))
        except KubeRefused as error:
            with suppress(KubeRefused):
                self._delete(rayjob)
            raise self._refusal(error) from error

    def _create_rayjob(self, submission: Submission) -> Manifest:
        """The RayJob of an attempt, made now or before."""
        nonce = secrets.token_hex(4)
        manifest = rayjob_of(submission, self._template(), self._options, nonce)
        try:
            return self._api.create(RAYJOBS, manifest)
        except KubeRefused as error:
            if not error.is_conflict:
                raise self._refusal(error) from error
        found = self._get(submission.attempt_id)
        if found is None or going_since(found):
            name = name_of(submission.attempt_id)
            raise BackendUnreachable(f"RayJob {name} of an earlier try is just being deleted")
        if attempt_of(found) != submission.attempt_id:
            raise SubmissionRefused(
                f"namespace {self._options.namespace} has another RayJob with the name "
                f"{found['metadata']['name']}; delete it, or use a namespace of your own"
            )
        return found

    def _refusal(self, error: KubeRefused) -> SubmissionRefused | BackendUnreachable:
        if error.is_conflict or error.is_missing:
            # Somebody else wrote, or deleted, at the same moment.
            return BackendUnreachable(f"a conflict in Kubernetes, trying again: {error}")
        return SubmissionRefused(
            f"Kubernetes refuses the RayJob (HTTP {error.status}): {error}; compare the cluster "
            "template with what KubeRay and the policies of the cluster allow"
        )

    # ---- observe

    def observe(self, attempt_id: str) -> Observation:
        try:
            rayjob = self._find(attempt_id)
            if rayjob is not None:
                return self._observed(rayjob)
        except (BackendUnreachable, KubeRefused) as error:
            away = Observation(ObservedState.UNREACHABLE, str(error))
            return self._unless_shared(attempt_id, away)
        gone = Observation(ObservedState.NOT_FOUND, "there is no RayJob of this attempt")
        return self._unless_shared(attempt_id, self._endings.get(attempt_id, gone))

    def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
        """Those of the shared cluster; the others are known from the watch."""
        shared = [each for each in attempt_ids if self._is_own.get(each) is False]
        return self._shared.observe_all(shared) if self._shared and shared else {}

    def _find(self, attempt_id: str) -> Manifest | None:
        """The RayJob of an attempt, from the watch or by asking; None where there is none."""
        if self._is_own.get(attempt_id) is False:
            return None
        found = self._watch.find(name_of(attempt_id))
        if found is None or is_cut_off(found):
            # It may have been made, or carried through, a moment ago.
            found = self._get(attempt_id)
        return found if found is not None and attempt_of(found) == attempt_id else None

    def _get(self, attempt_id: str) -> Manifest | None:
        try:
            return self._api.get(RAYJOBS, name_of(attempt_id))
        except KubeRefused as error:
            if error.is_missing:
                return None
            raise

    def _unless_shared(self, attempt_id: str, otherwise: Observation) -> Observation:
        """What the shared cluster knows, if it may be one of its attempts."""
        is_own = self._is_own.get(attempt_id)
        if is_own or self._shared is None:
            return otherwise
        found = self._shared.observe(attempt_id)
        if found.state not in (ObservedState.NOT_FOUND, ObservedState.UNREACHABLE):
            self._is_own[attempt_id] = False
            return found
        is_settled = is_own is False or otherwise.state is ObservedState.NOT_FOUND
        return found if is_settled else otherwise

    def _observed(self, rayjob: Manifest) -> Observation:
        self._is_own[str(attempt_of(rayjob))] = True
        if is_cut_off(rayjob):
            # Submitted again, it is carried through.
            return Observation(ObservedState.NOT_FOUND, "its submission was cut off")
        if is_evicted(rayjob) or is_given_up(rayjob):
            return self._taken_down(rayjob)
        since = going_since(rayjob)
        if since and not is_over(rayjob):
            message = f"its RayJob is being deleted since {since}; if that takes minutes: is "
            message += "KubeRay's operator at work, and are the machines of its pods there?"
            return Observation(ObservedState.PENDING, message)
        self._note_let_go(rayjob)
        if is_pending(rayjob):
            return observation_of(rayjob, self._pod_problems.of(rayjob))
        return observation_of(rayjob)

    def _taken_down(self, rayjob: Manifest) -> Observation:
        """How an attempt ended whose driver may run on: said once its cluster is gone.

        KubeRay asks the driver to stop as the RayJob is deleted.
        """
        end, since, name = observation_of(rayjob), going_since(rayjob), rayjob["metadata"]["name"]
        self._endings[str(attempt_of(rayjob))] = end
        if since is None:
            logger.info("RayJob %s: %s; deleting it", name, end.message)
            self._delete(rayjob)
        elif self._clock() - unix_s(since) > TAKE_DOWN_S:
            return end
        return Observation(ObservedState.PENDING, f"its cluster is taken down: {end.message}")

    def _note_let_go(self, rayjob: Manifest) -> None:
        """Note that Kueue admitted a RayJob: suspended again, it has been evicted."""
        if is_suspended(rayjob) or was_let_go(rayjob) or is_over(rayjob):
            return
        noted = {"metadata": {"annotations": {LET_GO: "true"}}}
        # The next poll comes soon.
        with suppress(BackendUnreachable, KubeRefused):
            self._api.patch(RAYJOBS, rayjob["metadata"]["name"], noted)

    # ---- stop

    def stop(self, attempt_id: str) -> None:
        """Ask an attempt to end; an ended or unknown one is left alone.

        A driver that runs is asked by its head, and saves; before, the RayJob is deleted.
        """
        try:
            rayjob = None if self._is_own.get(attempt_id) is False else self._get(attempt_id)
            if rayjob is not None and attempt_of(rayjob) == attempt_id:
                self._stop_own(rayjob)
                return
        except KubeRefused as error:
            raise BackendUnreachable(f"cannot stop {attempt_id}: {error}") from error
        if self._shared is not None and not self._is_own.get(attempt_id):
            self._shared.stop(attempt_id)

    def forget(self, attempt_id: str) -> None:
        """That of the shared cluster; a RayJob that has ended is swept."""
        if self._shared is not None and not self._is_own.get(attempt_id):
            self._shared.forget(attempt_id)

    def _stop_own(self, rayjob: Manifest) -> None:
        if going_since(rayjob) or (is_over(rayjob) and not is_given_up(rayjob)):
            return
        if is_pending(rayjob) or is_evicted(rayjob) or is_given_up(rayjob):
            self._delete(rayjob)
            return
        try:
            with closing(self._head_of(rayjob)) as head:
                head.stop(str(attempt_of(rayjob)))
        except BackendUnreachable:
            self._stop_without_head(rayjob)

    def _stop_without_head(self, rayjob: Manifest) -> None:
        """Delete a cluster whose head does not answer; not for the first silence.

        When it was silent first is kept with the RayJob, where every replica finds it.
        """
        metadata, now = rayjob["metadata"], self._clock()
        since = (metadata.get("annotations") or {}).get(STOP_FAILED_AT)
        silent_s = now - unix_s(since or "", now)
        if silent_s >= STOP_GRACE_S:
            logger.warning("RayJob %s: no answer from its head, deleting it", metadata["name"])
            self._delete(rayjob)
            return
        if since is None or silent_s <= 0.0:
            at = datetime.fromtimestamp(now, UTC).isoformat()
            noted = {"metadata": {"annotations": {STOP_FAILED_AT: at}}}
            self._api.patch(RAYJOBS, metadata["name"], noted)
        raise BackendUnreachable(
            f"the head of RayJob {metadata['name']} does not answer; its cluster is deleted if it "
            f"does not within {STOP_GRACE_S:g} s"
        )

    def _delete(self, rayjob: Manifest) -> None:
        """Delete a RayJob, and by its owner references all that was made for it.

        Raises `KubeRefused` where a policy of the cluster keeps it.
        """
        metadata = rayjob["metadata"]
        try:
            self._api.delete(RAYJOBS, metadata["name"], metadata["uid"])
        except KubeRefused as error:
            # A conflict says that another object has the name now: ours is gone.
            if not error.is_conflict:
                raise

    def _sweep(self, rayjobs: list[Manifest]) -> None:
        """Delete RayJobs that nobody needs any more."""
        for rayjob in rayjobs:
            if is_garbage(rayjob, self._clock()):
                name = rayjob["metadata"]["name"]
                logger.info("RayJob %s is over, deleting it", name)
                try:
                    self._delete(rayjob)
                except KubeRefused as error:
                    logger.warning(
                        "RayJob %s stays: Kubernetes does not delete it: %s", name, error
                    )

    # ---- what else is asked

    def check(self) -> str:
        version = self._api.version()
        self._api.list(RAYJOBS, limit="1")
        shared = self._shared.check() if self._shared else "none"
        return f"Kubernetes {version} with ray.io/v1; shared cluster: {shared}"

    def hosts(self) -> tuple[HostFacts, ...] | None:
        """Live hosts of the shared cluster; None where there is none."""
        return self._shared.hosts() if self._shared else None

    def own_hosts(self, spec: JobSpec) -> tuple[HostFacts, ...] | None:
        groups = (self._template().get("spec") or {}).get("workerGroupSpecs") or []
        return hosts_of(size_of(spec, groups))

    def _head_of(self, rayjob: Manifest) -> RayJobsBackend:
        token_of = self._options.ray_token_of
        token = token_of(str(attempt_of(rayjob))) if token_of else None
        return self._open_head(f"http://{rayjob['status']['dashboardURL']}", token)


class IsolatedProjectsBackend(Backend):
    """A backend for each project that has a namespace of its own, and one for all others."""

    name = "kuberay"
    makes_clusters = True

    def __init__(self, others: KubeRayBackend, isolated: Mapping[str, KubeRayBackend]) -> None:
        self.address = others.address
        self.isolated_projects = frozenset(isolated)
        self._others = others
        self._isolated = isolated
        self._all = (others, *isolated.values())
        # As in `KubeRayBackend`: a cache. What is not in it is looked for in every namespace.
        self._known = Remembered[KubeRayBackend]()

    def start(self) -> None:
        for each in self._all:
            each.start()

    def close(self) -> None:
        for each in self._all:
            each.close()

    def submit(self, submission: Submission) -> None:
        chosen = self._isolated.get(submission.spec.project, self._others)
        self._known[submission.attempt_id] = chosen
        chosen.submit(submission)

    def observe(self, attempt_id: str) -> Observation:
        found = Observation(ObservedState.NOT_FOUND)
        for each in self._where(attempt_id):
            seen = each.observe(attempt_id)
            if seen.state not in (ObservedState.NOT_FOUND, ObservedState.UNREACHABLE):
                self._known[attempt_id] = each
                return seen
            if found.state is ObservedState.NOT_FOUND:
                found = seen
        return found

    def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
        return self._others.observe_all(attempt_ids)

    def stop(self, attempt_id: str) -> None:
        for each in self._where(attempt_id):
            each.stop(attempt_id)

    def forget(self, attempt_id: str) -> None:
        for each in self._where(attempt_id):
            each.forget(attempt_id)

    def check(self) -> str:
        """A line about all; the namespace of one project that is in trouble concerns no other."""
        line = f"{self._others.check()}; {len(self._isolated)} isolated project(s)"
        for project, each in self._isolated.items():
            try:
                each.check()
            except (BackendUnreachable, KubeRefused) as error:
                line += f"; {project}: {error}"
        return line

    def hosts(self) -> tuple[HostFacts, ...] | None:
        return self._others.hosts()

    def own_hosts(self, spec: JobSpec) -> tuple[HostFacts, ...] | None:
        return self._others.own_hosts(spec)

    def _where(self, attempt_id: str) -> Sequence[KubeRayBackend]:
        """Where an attempt may be."""
        known = self._known.get(attempt_id)
        return (known,) if known else self._all
