"""The dashboard that a platform team looks at in the morning: jobs, queue, service."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.observability.panels import AnyPanel, Column, Query, board, graph, listing, number

_JOB_URL = "/d/shardloom-job?var-project=${__data.fields.Project}&var-job_id=${__value.text}"


def overview() -> dashboard.Dashboard:
    """Jobs, queue, ends and service."""
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
        number("Replicas up", Query('sum(up{job="shardloom"})'), red_below=1),
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
            bounds=(0, 1),
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
            Query("rate(shardloom_backend_unreachable_total[5m])", "{{instance}}"),
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
