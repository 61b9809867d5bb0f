"""What to change when a job ended for a reason: one sentence or two for each."""

from __future__ import annotations

from service.domain import EndReason

_ADVICE: dict[EndReason, str] = {
    EndReason.WORKERS_LOST: "Read the end of the lost rank's log. A crash that comes back is not "
    "mended by more retries; if machines come and go, raise retry.max_failures.",
    EndReason.DRIVER_LOST: "Read the end of the driver's log and look at the cluster's head node: "
    "did it run out of memory, or was it restarted?",
    EndReason.FORGOTTEN: "The cluster was restarted. Nothing in the job needs to change.",
    EndReason.SUBMISSION_REFUSED: "Ask whoever runs the cluster: it refuses this submission, and "
    "would again.",
    EndReason.BAD_SPEC: "Correct the field that the message names and submit the job again.",
    EndReason.DATA_ERROR: "Correct the data that the message names, or prepare it again with "
    "`shardloom data prepare`.",
    EndReason.STORAGE_ERROR: "Check that run storage (SHARDLOOM_RUNS_DIR) and data.path are "
    "mounted or answer on every host, that credentials are set, and that disks have room.",
    EndReason.TRAINING_ERROR: "Read the end of the log of the rank that the message names.",
    EndReason.USER_CODE: "Mend the code of model.module where the traceback shows it, and submit "
    "the job again with --code.",
    EndReason.VERSION_MISMATCH: "Install the same versions on the service and on every host of "
    "the cluster.",
    EndReason.DIVERGED: "Copies of a shard came out unequal again and again. Look for failing "
    "memory on the host of the ranks that the timeline names.",
    EndReason.HANG: "Look at the log of the rank that hangs and at its host. If one step may take "
    "that long, raise recovery.min_hang_s or recovery.hang_factor.",
    EndReason.DEVICE_OOM: "Lower data.batch_size, or raise parallelism.shard_group_size (with "
    "workers), so that each device holds less of the tables.",
    EndReason.HOST_OOM: "Lower data.batch_size, raise parallelism.shard_group_size (with workers), "
    "or place fewer workers on a host with resources.cpus_per_worker.",
    EndReason.HOST_LOST: "Nothing in the job needs to change. To train through the loss of a host, "
    "set parallelism.survive.hosts and checkpoint more often.",
    EndReason.PREEMPTED: "Nothing in the job needs to change. If machines are often taken away, "
    "set parallelism.survive.hosts and checkpoint more often.",
    EndReason.NON_FINITE: "Lower optimizer.sparse.lr or optimizer.dense.lr, add a warm-up "
    "(optimizer.schedule), look for outliers in the data, or leave such rows out with "
    "training.on_non_finite: skip.",
    EndReason.ROWS_SKIPPED: "The loss became NaN on ever more rows: lower optimizer.sparse.lr or "
    "optimizer.dense.lr, add a warm-up (optimizer.schedule), or look for outliers in the data.",
    EndReason.NO_ROOM: "Add hosts, free some, or lower parallelism.workers.min or "
    "parallelism.survive.hosts.",
    EndReason.RUN_IN_USE: "Another attempt still writes to this run folder. The job is tried "
    "again; should that attempt not end, stop the process that the message names.",
    EndReason.RETRIES_EXHAUSTED: "The reason of the last attempt says what to change; raise "
    "retry.max_failures only if such failures are to be expected.",
}


def advice_of(reason: EndReason | None, last_attempt: EndReason | None = None) -> str:
    """What to change after a job, or an attempt, ended for `reason`; empty where nothing is.

    Where the budget was spent, the reason of the last attempt is the one that matters.
    """
    if reason is EndReason.RETRIES_EXHAUSTED and last_attempt in _ADVICE:
        reason = last_attempt
    return "" if reason is None else _ADVICE.get(reason, "")
