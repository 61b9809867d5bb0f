"""Our Grafana dashboards (11.6 or later), as code: `deploy.observability.build` writes them.

They read the recording rules of `rules/recording.yaml` where there are any, so that several
replicas of the service never count twice.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.observability.overview import overview
from deploy.observability.panels import Query, board, choice, graph, number

_JOB = 'job_id="$job_id"'


def job() -> dashboard.Dashboard:
    """One live job."""
    made = board("shardloom-job", "Shardloom: job", "One job while it lives.")
    made = made.with_variable(
        choice("project", "Project", "label_values(shardloom_job_info, project)")
    )
    made = made.with_variable(
        choice("job_id", "Job", 'label_values(shardloom_job_info{project="$project"}, job_id)')
    )
    for part in (_job_numbers, _job_course, _job_copies, _job_trouble):
        made = part(made)
    return made


def _of(metric: str) -> str:
    """A metric of the chosen job, as any replica shows it."""
    return f"max({metric}{{{_JOB}}})"


def _job_numbers(made: dashboard.Dashboard) -> dashboard.Dashboard:
    status = Query(f"max by (status) (shardloom_job_status{{{_JOB}}})", "{{status}}")
    share = f"{_of('shardloom_job_steps')} / ({_of('shardloom_job_wanted_steps')} > 0)"
    return (
        made.with_panel(number("Status", status))
        .with_panel(number("Done", Query(share), unit="percentunit"))
        .with_panel(number("Workers", Query(_of("shardloom_job_workers"))))
        .with_panel(number("Attempts", Query(_of("shardloom_job_attempts"))))
        .with_panel(number("Failures that count", Query(_of("shardloom_job_failures"))))
        .with_panel(
            number("Copies that differed", Query(_of("shardloom_job_divergences")), red_from=1)
        )
    )


def _job_course(made: dashboard.Dashboard) -> dashboard.Dashboard:
    lost = f"job_id_cause:shardloom_job_lost_seconds:rate30m{{{_JOB}}}"
    return (
        made.with_row(dashboard.Row("Course"))
        .with_panel(
            graph(
                "Steps",
                Query(_of("shardloom_job_steps"), "trained"),
                Query(_of("shardloom_job_wanted_steps"), "wanted"),
            )
        )
        .with_panel(graph("Rows per second", Query(_of("shardloom_job_rows_per_second"), "rows/s")))
        .with_panel(graph("Rows", Query(_of("shardloom_job_rows"), "rows")))
        .with_panel(
            graph(
                "Goodput",
                Query(_of("shardloom_job_goodput_ratio"), "of the attempt"),
                Query(f"job_id:shardloom_job_goodput_ratio:rate30m{{{_JOB}}}", "last 30 min"),
                unit="percentunit",
                bounds=(0, 1),
                text="Share of the workers' time that trained rows that count.",
            )
        )
        .with_panel(
            graph(
                "Time lost to",
                Query(lost, "{{cause}}"),
                text="Groups' seconds per second.",
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "At risk",
                Query(f"job_id:shardloom_job_idle_seconds:min{{{_JOB}}}", "since the last step"),
                Query(
                    f"job_id:shardloom_job_unsaved_seconds:min{{{_JOB}}}",
                    "since the last checkpoint",
                ),
                unit="s",
            )
        )
    )


def _job_copies(made: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        made.with_row(dashboard.Row("Copies and groups"))
        .with_panel(
            graph(
                "Hosts with a copy of the rarest shard",
                Query(_of("shardloom_job_alive_host_copies"), "alive"),
                Query(_of("shardloom_job_needed_host_copies"), "needed"),
            )
        )
        .with_panel(
            graph(
                "Groups",
                Query(_of("shardloom_job_current_groups"), "training"),
                Query(_of("shardloom_job_wanted_groups"), "wanted"),
                Query(_of("shardloom_job_alive_copies"), "copies of the rarest shard"),
            )
        )
        .with_panel(graph("Workers", Query(_of("shardloom_job_workers"), "workers")))
    )


def _job_trouble(made: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        made.with_row(dashboard.Row("Trouble of the attempt"))
        .with_panel(
            graph(
                "Losses and recoveries",
                Query(_of("shardloom_job_lost_groups"), "groups lost"),
                Query(_of("shardloom_job_recoveries"), "recoveries"),
                Query(_of("shardloom_job_divergences"), "divergences"),
            )
        )
        .with_panel(
            graph(
                "Pause of recoveries, in all",
                Query(_of("shardloom_job_recovery_pause_seconds"), "pause"),
                unit="s",
            )
        )
        .with_panel(
            graph(
                "Steps in no checkpoint",
                Query(_of("shardloom_job_undurable_steps"), "steps"),
            )
        )
    )


def _newest(metric: str) -> str:
    """A gauge of Ray, which shows a value once and leaves it out until it has measured again."""
    return f"last_over_time({metric}[2m])"


def _by_node(expr: str, legend: str = "{{instance}}", how: str = "sum") -> Query:
    return Query(f"{how} by (instance) ({expr})", legend)


def ray() -> dashboard.Dashboard:
    """The machines under the jobs, as Ray tells of them."""
    made = board("shardloom-ray", "Shardloom: Ray nodes", "Ray's own metrics, by node.")
    states = ("active", "idle", "pending", "failed")
    nodes = [Query(f"sum({_newest(f'ray_cluster_{state}_nodes')})", state) for state in states]
    made = made.with_panel(graph("Nodes", *nodes))
    used = f"{_newest('ray_node_mem_used')} / {_newest('ray_node_mem_total')}"
    shares = {
        "CPU": f"{_newest('ray_node_cpu_utilization')} / 100",
        "Memory": used,
        "GPU": f"{_newest('ray_node_gpus_utilization')} / 100",
        "Disk": f"{_newest('ray_node_disk_utilization_percentage')} / 100",
    }
    for title, share in shares.items():
        query = _by_node(share, how="avg")
        made = made.with_panel(graph(title, query, unit="percentunit", bounds=(0, 1)))
    # Ray tells it in MiB.
    gpu_memory = _by_node(f"{_newest('ray_node_gram_used')} * 1048576")
    made = made.with_panel(graph("GPU memory used", gpu_memory, unit="bytes"))
    for title, kind in (("Network", "node_network"), ("Disk", "node_disk_io")):
        made = made.with_panel(graph(f"{title} speed", *_speeds(kind), unit="Bps", width=12))
    return made


def _speeds(kind: str) -> list[Query]:
    """Bytes per second in and out of each node."""
    words = ("receive", "send") if kind == "node_network" else ("read", "write")
    return [
        _by_node(_newest(f"ray_{kind}_{word}_speed"), f"{word} {{{{instance}}}}") for word in words
    ]


def dashboards() -> dict[str, dashboard.Dashboard]:
    """Every dashboard by the name of its file."""
    return {"overview.json": overview(), "job.json": job(), "ray.json": ray()}
