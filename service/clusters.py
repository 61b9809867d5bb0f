"""Which cluster a job runs on: the shared one, or one of its own where the backend makes such."""

from __future__ import annotations

from service.backends.base import Backend, ClusterNeed, HostFacts
from service.domain import Job
from service.errors import BackendUnreachable, SubmissionRefused
from service.sizes import sizes_of_spec
from trainer.spec import FieldProblem, JobSpec, SpecError

_FIELD = "resources.cluster"


def has_own_cluster(job: Job) -> bool:
    """Whether a job takes nothing of the shared cluster."""
    return job.spec.resources.cluster == "own"


def cluster_text(spec: JobSpec) -> str:
    """Which cluster a job runs on, in words."""
    resources = spec.resources
    if resources.cluster == "shared":
        return "shared"
    return f"its own, by Kueue queue {resources.queue}" if resources.queue else "its own"


def need_of(spec: JobSpec) -> ClusterNeed:
    """What a cluster must hold for a job."""
    sizes, resources, survive = sizes_of_spec(spec), spec.resources, spec.parallelism.survive
    return ClusterNeed(
        is_own=resources.cluster == "own",
        queue=resources.queue,
        deadline_s=resources.deadline_s,
        min_workers=sizes.min_workers,
        max_workers=sizes.world_size,
        group_size=sizes.shard_group_size,
        num_hosts=survive.hosts + 1 if survive else 1,
        device=resources.device,
        cpus_per_worker=resources.cpus_per_worker,
        job_name=spec.name,
        project=spec.project,
        priority=spec.priority,
    )


def check_cluster(backend: Backend, spec: JobSpec) -> None:
    """Raise `SpecError` where a job asks for a cluster of its own and there is none to be had.

    A backend that does not answer now is taken to say yes.
    """
    if spec.resources.cluster == "shared":
        return
    if not backend.makes_clusters:
        message = (
            f"the backend {backend.name} has one cluster for all jobs; set it to shared, or run "
            "the service with SHARDLOOM_BACKEND=kuberay"
        )
        raise SpecError([FieldProblem(_FIELD, "no_own_clusters", message)])
    try:
        backend.own_hosts(need_of(spec))
    except SubmissionRefused as error:
        raise SpecError([FieldProblem("resources", "no_room", str(error))]) from None
    except BackendUnreachable:
        return


def hosts_for(backend: Backend, spec: JobSpec) -> tuple[HostFacts, ...]:
    """Hosts that a job will find, as far as they are known: a plan can do without."""
    try:
        if spec.resources.cluster == "own":
            return backend.own_hosts(need_of(spec)) or ()
        return backend.hosts() or ()
    except (BackendUnreachable, SubmissionRefused):
        return ()
