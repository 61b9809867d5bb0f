"""Our Grafana dashboards (11.6 or later), as code: `deploy.observability.build` writes them.

They read the recording rules of `rules/recording.yaml` where there are any, so that several
replicas of the service never count twice.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.observability.panels import (
    AnyPanel,
    Column,
    Query,
    board,
    choice,
    graph,
    listing,
    number,
)

_JOB = 'job_id="$job_id"'
_JOB_URL = "/d/shardloom-job?var-project=${__data.fields.Project}&var-job_id=${__value.text}"


def overview() -> dashboard.Dashboard:
    """What a platform team looks at in the morning: jobs, queue, ends and service."""
    rows = {
        "": _numbers(),
        "Jobs": _jobs(),
        "Queue": _queue(),
        "Ends": _ends(),
        "Service": _service(),
    }
    return board("shardloom-overview", "Shardloom", "Jobs, queue and service.", rows)


def _numbers() -> list[AnyPanel]:
    return [
        number("Alerts", Query('count(ALERTS{alertname=~"Shardloom.*", alertstate="firing"})')),
        number("Replicas up", Query('sum(up{job="shardloom"})'), below_1="red"),
        number("Running", Query('status:shardloom_live_jobs:max{status="RUNNING"}')),
        number("Queued", Query('status:shardloom_live_jobs:max{status="QUEUED"}')),
        number("Workers", Query("sum(project:shardloom_job_workers:sum)")),
        number("Rows per second", Query("shardloom:job_rows_per_second:sum")),
    ]


def _jobs() -> list[AnyPanel]:
    status = (
        "max by (job_id, project, status) (shardloom_job_status)"
        " * on (job_id, project) group_left (name) job_id:shardloom_job_info:max"
    )
    by_job = "max by (job_id, project) ({})"
    jobs = listing(
        "Live jobs",
        {"name": "Name", "project": "Project", "status": "Status", "job_id": "Job"},
        Column("Jobs", status),
        Column("Workers", "job_id:shardloom_job_workers:max"),
        Column("Steps", by_job.format("shardloom_job_steps")),
        Column("Of", by_job.format("shardloom_job_wanted_steps > 0")),
        Column("Rows/s", "job_id:shardloom_job_rows_per_second:max"),
        Column("Goodput", by_job.format("shardloom_job_goodput_ratio"), "percentunit"),
        Column("Idle", "job_id:shardloom_job_idle_seconds:min", "s"),
        Column("Unsaved", "job_id:shardloom_job_unsaved_seconds:min", "s"),
        link=("Job", _JOB_URL),
    )
    return [
        jobs,
        graph("Live jobs", Query("status:shardloom_live_jobs:max", "{{status}}"), stacked=True),
        graph(
            "Workers by project",
            Query("project:shardloom_job_workers:sum", "{{project}}"),
            stacked=True,
        ),
        graph(
            "Goodput, last 30 min",
            Query("job_id:shardloom_job_goodput_ratio:rate30m", "{{job_id}}"),
            unit="percentunit",
            most=1,
        ),
    ]


def _queue() -> list[AnyPanel]:
    return [
        graph(
            "Longest wait",
            Query("project:shardloom_queue_oldest_wait_seconds:max", "{{project}}"),
            unit="s",
            text="How long the job waits that has done so longest.",
        ),
        graph(
            "Wait in the queue, 90% within",
            Query("shardloom:queue_wait_seconds:p90_1h", "in the queue"),
            Query("shardloom:submit_to_running_seconds:p90_1h", "from submission to training"),
            unit="s",
        ),
        graph(
            "Attempts submitted per hour",
            Query("sum(increase(shardloom_submitted_attempts_total[1h]))", "attempts"),
        ),
    ]


def _ends() -> list[AnyPanel]:
    return [
        graph(
            "Jobs ended per hour",
            Query("status_reason:shardloom_ended_jobs:increase1h > 0", "{{status}} {{reason}}"),
            width=12,
            stacked=True,
        ),
        graph(
            "Attempts ended per hour",
            Query("reason:shardloom_ended_attempts:increase1h > 0", "{{reason}}"),
            width=12,
            stacked=True,
        ),
    ]


def _service() -> list[AnyPanel]:
    return [
        graph(
            "Requests",
            Query("shardloom:requests:rate5m", "all"),
            Query(
                'sum by (status) (rate(shardloom_request_seconds_count{status=~"[45].."}[5m]))',
                "{{status}}",
            ),
            unit="reqps",
        ),
        graph(
            "Answers, 99% begin within",
            Query("topk(10, route:shardloom_request_seconds:p99_5m)", "{{route}}"),
            unit="s",
        ),
        graph(
            "Transactions, 99% take less",
            Query("kind:shardloom_store_seconds:p99_5m", "{{kind}}"),
            unit="s",
        ),
        graph(
            "Reconciler",
            Query("shardloom_reconcile_lag_seconds", "not looked for: {{instance}}"),
            Query(
                "histogram_quantile(0.99, sum by (le) "
                "(rate(shardloom_reconcile_seconds_bucket[5m])))",
                "a look at one job, 99%",
            ),
            Query(
                "histogram_quantile(0.99, sum by (le) "
                "(rate(shardloom_reconcile_wait_seconds_bucket[5m])))",
                "wait for a thread, 99%",
            ),
            unit="s",
        ),
        graph(
            "Cluster does not answer",
            Query("rate(shardloom_backend_unreachable_total[5m])", "{{instance}} {{cluster}}"),
            unit="reqps",
        ),
        graph(
            "Records of drivers",
            Query("sum(rate(shardloom_events_received_total[5m]))", "records"),
            Query("sum(rate(shardloom_points_received_total[5m]))", "metric points"),
            unit="cps",
        ),
        graph("Streams followed", Query("sum(shardloom_stream_followers)", "streams"), width=12),
        graph(
            "Webhooks",
            Query("sum by (state) (rate(shardloom_webhook_tries_total[5m]))", "{{state}}"),
            unit="cps",
            width=12,
        ),
    ]


def job() -> dashboard.Dashboard:
    """One live job."""
    return board(
        "shardloom-job",
        "Shardloom: job",
        "One job while it lives.",
        {
            "": _job_numbers(),
            "Course": _job_course(),
            "Copies and groups": _job_copies(),
            "Trouble of the attempt": _job_trouble(),
        },
        choice("project", "Project", "label_values(shardloom_job_info, project)"),
        choice("job_id", "Job", 'label_values(shardloom_job_info{project="$project"}, job_id)'),
    )


def _of(metric: str, legend: str = "") -> Query:
    """A metric of the chosen job, as any replica shows it."""
    return Query(f"max({metric}{{{_JOB}}})", legend)


def _job_numbers() -> list[AnyPanel]:
    status = Query(f"max by (status) (shardloom_job_status{{{_JOB}}})", "{{status}}")
    steps, wanted = _of("shardloom_job_steps").expr, _of("shardloom_job_wanted_steps").expr
    return [
        number("Status", status),
        number("Done", Query(f"{steps} / ({wanted} > 0)"), unit="percentunit"),
        number("Workers", _of("shardloom_job_workers")),
        number("Attempts", _of("shardloom_job_attempts")),
        number("Failures that count", _of("shardloom_job_failures")),
        number("Copies that differed", _of("shardloom_job_divergences"), from_1="red"),
    ]


def _job_course() -> list[AnyPanel]:
    lost = f"job_id_cause:shardloom_job_lost_seconds:rate30m{{{_JOB}}}"
    return [
        graph(
            "Steps",
            _of("shardloom_job_steps", "trained"),
            _of("shardloom_job_wanted_steps", "wanted"),
        ),
        graph("Rows per second", _of("shardloom_job_rows_per_second", "rows/s")),
        graph("Rows", _of("shardloom_job_rows", "rows")),
        graph(
            "Goodput",
            _of("shardloom_job_goodput_ratio", "of the attempt"),
            Query(f"job_id:shardloom_job_goodput_ratio:rate30m{{{_JOB}}}", "last 30 min"),
            unit="percentunit",
            most=1,
            text="Share of the workers' time that trained rows that count.",
        ),
        graph(
            "Time lost to",
            Query(lost, "{{cause}}"),
            text="Groups' seconds per second.",
            stacked=True,
        ),
        graph(
            "At risk",
            Query(f"job_id:shardloom_job_idle_seconds:min{{{_JOB}}}", "since the last step"),
            Query(
                f"job_id:shardloom_job_unsaved_seconds:min{{{_JOB}}}", "since the last checkpoint"
            ),
            unit="s",
        ),
    ]


def _job_copies() -> list[AnyPanel]:
    return [
        graph(
            "Hosts with a copy of the rarest shard",
            _of("shardloom_job_alive_host_copies", "alive"),
            _of("shardloom_job_needed_host_copies", "needed"),
        ),
        graph(
            "Groups",
            _of("shardloom_job_current_groups", "training"),
            _of("shardloom_job_wanted_groups", "wanted"),
            _of("shardloom_job_alive_copies", "copies of the rarest shard"),
        ),
        graph("Workers", _of("shardloom_job_workers", "workers")),
    ]


def _job_trouble() -> list[AnyPanel]:
    return [
        graph(
            "Losses and recoveries",
            _of("shardloom_job_lost_groups", "groups lost"),
            _of("shardloom_job_recoveries", "recoveries"),
            _of("shardloom_job_divergences", "divergences"),
        ),
        graph(
            "Commits came later by, for recoveries",
            _of("shardloom_job_recovery_pause_seconds", "later"),
            unit="s",
        ),
        graph("Steps in no checkpoint", _of("shardloom_job_undurable_steps", "steps")),
    ]


def dashboards() -> dict[str, dashboard.Dashboard]:
    """Every dashboard by the name of its file."""
    return {"overview.json": overview(), "job.json": job()}
