"""Metrics as a run in MLflow. Needs the package `mlflow-skinny`."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.protocol.events import AttemptEnded, AttemptStarted, Event, Metrics

_JOB_TAG = "shardloom.job_id"
# MLflow's own limits of one request.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_PARAM_CHARS = 500
_MAX_NAME_CHARS = 250
# What MLflow takes in no name: other characters, and what would be no path in its simplest form.
_REFUSED = re.compile(r"[^\w.\- :/]|^[./]+|/(?=[./]|$)")
_FINAL_STATUS = {"completed": "FINISHED", "cancelled": "KILLED"}
# A paused job goes on later, in the same run.
_PAUSED_STATUS = "SCHEDULED"


@dataclass
class MlflowSink:
    """One run per job, which attempts find by its tag."""

    name = "mlflow"
    tracking_uri: str
    experiment: str
    job_id: str
    spec: Mapping[str, Any]
    _client: Any = None
    _run_id: str = ""

    def open(self) -> None:
        """Find the job's run, or begin it."""
        # MLflow would report its use to its makers: nobody asked the user for that.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # By default it tries for minutes, longer than a driver waits at its end.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        self._run_id = self._find_or_create_run()

    def take(self, events: Sequence[Event]) -> None:
        metrics = _metrics_of(events)
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])
        for event in events:
            if isinstance(event, AttemptStarted):
                self._client.update_run(self._run_id, status="RUNNING")
            elif isinstance(event, AttemptEnded):
                self._end(event.reason)

    def _end(self, reason: str) -> None:
        """The run ends with its attempt, unless that was paused; another attempt opens it again."""
        if reason == "paused":
            self._client.update_run(self._run_id, status=_PAUSED_STATUS)
        else:
            self._client.set_terminated(self._run_id, _FINAL_STATUS.get(reason, "FAILED"))
        self._client.set_tag(self._run_id, "shardloom.reason", reason)

    def close(self) -> None:
        """Nothing is held open."""

    def _find_or_create_run(self) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name(self.experiment)
        experiment_id = (
            known.experiment_id if known else self._client.create_experiment(self.experiment)
        )
        wanted = f"tags.`{_JOB_TAG}` = '{self.job_id}'"
        found = self._client.search_runs([experiment_id], wanted, max_results=1)
        if found and found[0].data.params:
            return str(found[0].info.run_id)
        labels = self.spec.get("labels", {}).items()
        tags = {_JOB_TAG: self.job_id, **{_name(f"label.{key}"): text for key, text in labels}}
        name = str(self.spec.get("name", self.job_id))
        # One that has none was begun, and its parameters did not arrive.
        [run] = found or [self._client.create_run(experiment_id, tags=tags, run_name=name)]
        fields = {_name(key): text[:_MAX_PARAM_CHARS] for key, text in flattened(self.spec)}
        params = itertools.starmap(Param, itertools.islice(fields.items(), _MAX_PARAMS))
        self._client.log_batch(run.info.run_id, params=[*params])
        return str(run.info.run_id)


def _name(text: str) -> str:
    return _REFUSED.sub("_", text[:_MAX_NAME_CHARS])


def flattened(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a spec with dotted names; sections without names of their own as text."""
    for key, value in spec.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        elif value not in (None, [], {}) and not isinstance(value, list):
            yield f"{prefix}{key}", str(value)


def _metrics_of(events: Sequence[Event]) -> list[Any]:
    from mlflow.entities import Metric

    return [
        Metric(_name(name), value, int(event.time * 1000), event.step)
        for event in events
        if isinstance(event, Metrics)
        for name, value in event.values.items()
    ]
