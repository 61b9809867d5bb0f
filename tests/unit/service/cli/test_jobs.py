"""Commands about jobs: output, overrides, exit codes, groups and numbers as people read them."""

from __future__ import annotations

import io
import json
import math
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from service.backends.base import ClusterWatch
from service.backends.fake import Script
from service.cli import jobs, stack
from service.cli.common import BLOCKS, job_names, sparkline
from service.cli.main import main
from service.cli.render import jobs_table
from service.client.client import ShardloomClient
from service.client.errors import ServiceUnreachable
from service.client.transport import REQUEST_TIMEOUT_S
from service.dashboard import fragments
from service.domain.metrics import MEMORY_PARTS
from service.errors import StoreUnavailable
from service.schemas.jobs import JobSummary
from service.schemas.wording import NOTHING, TIMES
from tests.harness.builders import (
    NOW,
    attempt_ended,
    batch,
    checkpoint,
    group_lost,
    group_member,
    layout_chosen,
    membership_changed,
    metrics,
    predicted_workers,
    recovered,
    spec_document,
    workers_started,
)
from tests.harness.http_stub import http_stub
from tests.harness.service import (
    Api,
    FakeService,
    end,
    event_body,
    job_body,
    problem_body,
    running,
    shardloom,
)
from trainer.layout.hosts import HostFacts
from trainer.protocol.events import Event, Metrics


@pytest.fixture
def spec_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec_document()))
    return str(path)


def test_ps_lists_the_jobs_with_status_progress_and_metric(service):
    result = shardloom("ps")
    assert result.exit_code == 0
    for word in (
        "job-0000000000ab",
        "ratings",
        "RUNNING",
        "25 %  51.2k rows  1m 12s left",
        "validation/rmse 0.9340",
    ):
        assert word in result.stdout


def test_ps_shows_the_watched_metric_and_on_a_narrow_terminal_whole_ids():
    told = {"validation/auc": 0.71, "validation/rmse": 0.93}
    job = JobSummary.model_validate(job_body(watched_metric="auc", latest_metrics=told))
    for width, is_wide in ((200, True), (80, False)):
        console = Console(width=width, file=io.StringIO())
        console.print(jobs_table([job], 2000.0, width))
        text = console.file.getvalue()
        assert "job-0000000000ab" in text
        assert ("validation/auc 0.7100" in text) is is_wide


def test_reading_commands_print_json_for_programs(service):
    for command, read, expected in (
        ("ps", lambda found: [each["id"] for each in found], ["job-0000000000ab"]),
        ("show ratings", lambda found: found["id"], "job-0000000000ab"),
        ("events ratings", lambda found: [each["id"] for each in found], [1, 2]),
        ("metrics ratings", lambda found: found["names"], []),
        ("checkpoints ratings", lambda found: found, []),
    ):
        result = shardloom(*command.split(), "--json")
        assert result.exit_code == 0
        assert read(json.loads(result.stdout)) == expected, command


def test_show_tells_layout_progress_and_metrics(service):
    result = shardloom("show", "ratings")
    assert "4 workers (2 replicas x 2 shards)" in result.stdout
    assert not [word for word in ("generation", "copies", "at risk") if word in result.stdout]
    assert "step 50 of 200 (25.0 %), 51.2k rows, 2.13k rows/s, 1m 12s to go" in result.stdout
    service.states = [job_body(status="STARTING", message="no answer from Ray at http://ray:8265")]
    assert "no answer from Ray at http://ray:8265" in shardloom("show", "ratings").stdout
    service.events.append(event_body(3, kind="note", message="4 workers need 4 GPU: waiting"))
    text = shardloom("show", "ratings").stdout
    assert "start 4 workers need 4 GPU: waiting; " in " ".join(text.split())


def test_texts_of_jobs_steer_no_terminal(service):
    message = "lost \x1b]0;title\x07 \x1b[2J \x9b31m \u202e evil"
    service.states = [job_body(status="STARTING", message=message)]
    service.events = [event_body(1, message=message)]
    for command in ("show", "events"):
        shown = shardloom(command, "ratings").stdout
        assert "lost ␛]0;title" in shown
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*shown}


def test_an_unknown_job_is_refused_with_a_way_on(service):
    result = shardloom("show", "nobody")
    assert result.exit_code == 2
    assert "no job has the id or name 'nobody'" in result.stderr
    assert "shardloom ps" in result.stderr


def test_a_time_before_all_times_is_refused(service):
    result = shardloom("ps", "--since", "0001-01-01", "--until", "0001-01-02")
    assert result.exit_code == 2, result.output


def test_an_unreachable_service_is_named_with_a_way_to_start_it(service):
    service.is_down = True
    result = shardloom("ps", "--url", "http://elsewhere:9")
    assert result.exit_code == 3
    assert "http://elsewhere:9 (Connection refused)" in result.stderr
    assert "shardloom up" in result.stderr


@pytest.mark.usefixtures("client")
def test_metrics_and_checkpoints_of_a_job_are_shown(api: Api) -> None:
    job_id = api.start(name="ratings")
    # More than are asked for: each point that is told stands for two, but for the last.
    reports = [metrics(n, train_loss=1.0 + (n < 500) - 0.1 * (-1) ** n) for n in range(1000)]
    for told in (batch(*reports), batch(checkpoint(1200, is_best=True), first_seq=1000)):
        api.post_events(f"{job_id}-a0", told)
    line = shardloom("metrics", "ratings").stdout.splitlines()[1]
    assert line.split() == ["train/loss", "1.1000", "0.9000", "2.1000", "999", "█" * 12 + "▁" * 12]
    unknown = shardloom("metrics", "ratings", "--name", "train/lose")
    assert (unknown.exit_code, "train/loss" in unknown.stderr) == (2, True)
    saved = shardloom("checkpoints", "ratings").stdout
    for word in ("1,200", "best", "1 kB", "0.9000", "step-00001200"):
        assert word in saved
    unknown_ne = checkpoint(1300).model_copy(update={"metrics": {"validation/ne": math.nan}})
    api.post_events(f"{job_id}-a0", batch(unknown_ne, first_seq=1001))
    found = json.loads(shardloom("checkpoints", "ratings", "--json").stdout)
    assert found[-1]["metrics"] == {"validation/ne": None}


def test_submit_prints_the_id_alone_and_applies_overrides(service, spec_file):
    result = shardloom("submit", spec_file, "--set", "training.epochs=3", "--set", "name=other")
    assert (result.exit_code, result.stdout) == (0, "job-0000000000ab\n")
    assert shardloom("submit", "-", stdin=yaml.safe_dump(spec_document())).exit_code == 0
    first, second = service.submitted
    assert (first["training"]["epochs"], first["name"], second["name"]) == (3, "other", "tiny")


def test_a_relative_data_path_is_made_absolute_and_a_url_is_not(service, spec_file, tmp_path):
    shardloom("submit", spec_file, "--set", "data.path=prepared/../ratings")
    shardloom("submit", spec_file, "--set", "data.path=s3://bucket/ratings")
    assert service.submitted[0]["data"]["path"] == str(tmp_path / "ratings")
    assert service.submitted[1]["data"]["path"] == "s3://bucket/ratings"


def test_a_clone_takes_relative_paths_and_force_as_a_submit_does(service, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for changes, sent in (
        ("data.path=prepared", {"data.path": str(tmp_path / "prepared")}),
        ("data={path: ratings}", {"data": {"path": str(tmp_path / "ratings")}}),
        ("data.path=s3://bucket/ratings", {"data.path": "s3://bucket/ratings"}),
        ("data.path=~no-such-user/x", {"data.path": str(tmp_path / "~no-such-user/x")}),
    ):
        result = shardloom("clone", "ratings", "--set", changes, "--force")
        assert (result.exit_code, result.stdout) == (0, "job-0000000000ab\n")
        assert json.loads(service.requests[-1].content)["set"] == sent
        assert service.requests[-1].url.params["force"] == "true"


@pytest.mark.parametrize("value", ["!!binary aGk=", ".nan", "!!set {a}"])
def test_a_value_that_no_request_can_hold_is_refused(service, spec_file, value):
    for command in (("submit", spec_file), ("clone", "ratings")):
        result = shardloom(*command, "--set", f"name={value}")
        assert (result.exit_code, "leave out" in result.stderr) == (2, True), result.output
    for command in (("logs", "ratings", "--grep"), ("logs", "ratings", "-f", "--grep")):
        for pattern in ("\udcff", "x" * 2**16):
            assert shardloom(*command, pattern).exit_code == 2
    assert service.submitted == []


def test_submit_wait_mirrors_the_job_in_its_exit_code(service, spec_file):
    for status, code in (("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 130)):
        service.states = [job_body(), job_body(), job_body(status=status, message="why")]
        result = shardloom("submit", spec_file, "--wait")
        assert (result.exit_code, result.stdout) == (code, "job-0000000000ab\n")


def test_a_wait_that_fails_has_told_the_id_of_the_job(service, spec_file, monkeypatch):
    lost = Mock(side_effect=ServiceUnreachable("http://fake:1", "Connection refused"))
    monkeypatch.setattr(ShardloomClient, "wait", lost)
    result = shardloom("submit", spec_file, "--wait")
    assert (result.exit_code, "job-0000000000ab" in result.stderr) == (3, True)


def test_faults_that_the_service_finds_are_listed_by_field(service, spec_file):
    fields = [
        {"path": "data.path", "code": "missing_data", "message": "no such folder"},
        {"path": "embedding_tables[0].embedding_dim", "code": "x", "message": "is odd"},
    ]
    service.refusal = problem_body(422, "invalid_spec", "2 faults", fields=fields)
    result = shardloom("submit", spec_file)
    assert result.exit_code == 2
    lines = [line.split() for line in result.stderr.splitlines()]
    assert ["data.path", "no", "such", "folder"] in lines
    assert ["embedding_tables[0].embedding_dim", "is", "odd"] in lines


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_a_question_without_a_yes_ends_the_command_but_is_no_failed_job(service, answer):
    result = shardloom("delete", "ratings", stdin=answer)
    assert (result.exit_code, "aborted" in result.stderr) == (130, True)
    assert [request.method for request in service.requests] == ["GET"]


def test_cancel_says_which_job(service):
    result = shardloom("cancel", "ratings")
    assert result.exit_code == 0
    assert "job-0000000000ab (ratings) is being cancelled" in result.stdout
    assert service.requests[-1].url.path == "/v1/jobs/ratings:cancel"


def test_spec_check_lists_every_fault_and_needs_no_service(spec_file):
    assert shardloom("spec", "check", spec_file).exit_code == 0
    result = shardloom("spec", "check", spec_file, "--set", "parallelism.workers=3", "--set", "x=1")
    assert result.exit_code == 2
    assert "the spec has 2 faults:" in result.stderr
    assert "multiple of shard_group_size" in result.stderr
    missing = shardloom("spec", "check", "nowhere.yaml")
    assert (missing.exit_code, "nowhere.yaml" in missing.stderr) == (2, True)
    schema = json.loads(shardloom("spec", "schema").stdout)
    assert "embedding_tables" in schema["properties"]


@pytest.mark.parametrize(("text", "said"), [("", "is empty"), ("job", "no mapping"), ("[1]", "no")])
def test_a_text_that_is_no_spec_is_refused_before_anything_is_sent(service, text, said):
    for command in (("submit", "-"), ("plan", "-", "--set", "name=x"), ("run", "-")):
        result = shardloom(*command, stdin=text)
        assert (result.exit_code, said in result.stderr) == (2, True), result.output
    assert service.requests == []


def test_a_terminal_that_lacks_letters_shows_the_rest(spec_file, monkeypatch):
    command = ["plan", spec_file, "--scale", "2..8", "--cluster", "2xH100-80GB x 4"]

    def run(*arguments: str) -> tuple[object, bytes, bytes]:
        """Exit code and what was written to streams as Python opens them with these letters."""
        out, error = io.BytesIO(), io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(error, "ascii", "backslashreplace"))
        monkeypatch.setattr(sys, "argv", ["shardloom", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()
        sys.stderr.flush()
        return ended.value.code, out.getvalue(), error.getvalue()

    for options in ([], ["--json"]):
        code, out, error = run(*command, *options)
        assert code == 0, error
        assert b"GPUs" in out or json.loads(out)
    code, _, error = run("plan", "größe.yaml")
    assert (code, rb"gr\xf6\xdfe.yaml" in error) == (2, True), error


def test_plan_scale_estimates_each_size_without_a_service(service, spec_file):
    service.is_down = True
    small = ("plan", spec_file, "--scale", "2..8", "--cluster", "2xH100-80GB x 4")
    page = shardloom(*small)
    assert page.exit_code == 0, page.output
    for word in ("one copy (full model parallelism)", "sharding groups (2D)", "Samples/s", "1.00"):
        assert word in page.stdout
    found = json.loads(shardloom(*small, "--json").stdout)
    sizes = [(row["world_size"], row["shard_group_size"]) for row in found["rows"]]
    assert sizes == [(2, 2), (4, 4), (8, 8), (4, 2), (8, 2)]
    assert (found["cluster"]["num_hosts"], found["rows"][0]["fits"]) == (4, True)
    hot = shardloom(*small, "--set", "data.batch_size=1000000000")
    assert "out of memory" in hot.stdout


def test_sizes_that_cannot_be_scaled_to_are_refused(spec_file):
    result = shardloom("plan", spec_file, "--scale", "3..3")
    assert (result.exit_code, "multiple of shard_group_size" in result.stderr) == (2, True)


@pytest.mark.usefixtures("client")
def test_plan_scale_asks_the_service_for_sizes_that_the_data_has(spec_file, tmp_path):
    auto = ("plan", spec_file, "--set", "embedding_tables[0].num_embeddings=auto")
    scaled = (*auto, "--scale", "2..2", "--json")
    unknown = shardloom(*scaled)
    assert (unknown.exit_code, "tables have no sizes" in unknown.stderr) == (2, True)
    (tmp_path / "manifest.json").write_text('{"vocab_sizes": {"user_id": 50}}')
    found = json.loads(shardloom(*scaled, "--set", f"data.path={tmp_path}").stdout)
    assert found["table_bytes"] == 50 * (8 * 4 + 4)


def test_run_starts_nothing_for_a_faulty_spec_nor_beside_a_url(service, spec_file, monkeypatch):
    monkeypatch.setattr(stack, "ensure_running", lambda: pytest.fail("started a stack"))
    assert shardloom("run", spec_file, "--set", "training.epochs=-1").exit_code == 2
    service.states = [job_body(status="SUCCEEDED")]
    assert shardloom("run", spec_file, "--url", "http://elsewhere:1").exit_code == 0


def test_run_starts_the_stack_follows_and_mirrors_the_job(service, spec_file, monkeypatch):
    started = []
    monkeypatch.setattr(stack, "ensure_running", lambda: started.append(True))
    for status, code in (("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 130)):
        service.states = [job_body(status=status, ended_at=1010.0, message="the reason")]
        result = shardloom("run", spec_file)
        assert result.exit_code == code
        assert "line 1" in result.stdout
        assert f"{status} after 8s" in result.stdout
        assert "validation  rmse 0.9340" in result.stdout
        assert ("the reason" in result.stdout) == (code != 0)
    assert started == [True] * 3


def test_a_home_that_can_be_no_folder_is_named_and_is_no_failed_job(service, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path / "file" / "home"))
    result = shardloom("up")
    assert result.exit_code == 3
    assert "SHARDLOOM_HOME" in result.stderr


# ---- `shardloom cluster`, and completion


@pytest.mark.usefixtures("client")
def test_the_cluster_is_shown_with_its_hosts(api: Api) -> None:
    api.backend.set_hosts(HostFacts("10.0.0.7", 16.0, 8.0, 512 << 30))
    grows = api.settings.model_copy(update={"cluster_max_workers": 32})
    state = api.http.app.state
    watch = ClusterWatch(api.backend, every_s=0)
    state.context = replace(state.context, settings=grows, cluster=watch)
    shown = shardloom("cluster").stdout
    for word in (f"fake at {api.backend.address} answers", "fake cluster", "10.0.0.7", "550 GB"):
        assert word in shown
    assert "autoscales up to 32 workers" in shown
    assert json.loads(shardloom("cluster", "--json").stdout)["reachable"] is True
    api.backend.set_down(True)
    away = shardloom("cluster")
    assert (away.exit_code, "does not answer" in away.stdout) == (3, True)


def test_a_service_that_answers_without_its_database_says_so_in_the_status(
    api: Api, client: ShardloomClient
) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable("the database failed")

    state = api.http.app.state
    state.context = replace(state.context, cluster=Mock(latest=away))
    shown = shardloom("status")
    assert (shown.exit_code, "answers" in shown.stdout) == (0, True)
    assert "the database failed" in shown.stdout


def test_the_shell_completes_names_and_where_asked_for_ids(service: FakeService) -> None:
    service.states = [job_body(id="job-1")]
    for typed, offered in (("", "ratings"), ("rat", "ratings"), ("x", ""), ("job-", "job-1")):
        assert [name for name, _ in job_names(typed)] == offered.split()
    service.is_down = True
    assert job_names("") == []


def test_completion_asks_the_service_that_is_named_and_waits_for_none_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path))
    with http_stub(200) as stub, socket.create_server(("127.0.0.1", 0)) as hanging:
        stub.body = json.dumps({"items": [job_body()]}).encode()
        monkeypatch.setenv("SHARDLOOM_URL", stub.url)
        assert [name for name, _ in job_names("")] == ["ratings"]
        monkeypatch.setenv("SHARDLOOM_URL", f"http://127.0.0.1:{hanging.getsockname()[1]}")
        begun_s = time.monotonic()
        assert job_names("") == []
        assert time.monotonic() - begun_s < REQUEST_TIMEOUT_S / 2
    monkeypatch.delenv("SHARDLOOM_URL")
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path / "file" / "home"))
    assert job_names("") == []


# ---- curves


def test_a_curve_falls_is_flat_or_has_gaps():
    curves = ([4.0, 3.0, 2.0, 1.0], [2.0, 2.0], [], [1.0, math.nan, 2.0])
    assert [sparkline(curve) for curve in curves] == ["█▆▃▁", "▅▅", "", "▁ █"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 40))
def test_a_curve_fits_its_width_and_touches_top_and_bottom(values, width):
    curve = sparkline(values, width)
    assert len(curve) == min(width, len(values))
    assert set(curve) <= set(BLOCKS)
    assert len(set(curve)) == 1 or {BLOCKS[0], BLOCKS[-1]} <= set(curve)


# ---- groups and sizes


def report(api: Api, *records: Event, first_seq: int = 0) -> None:
    """Let the workers of the only job tell these."""
    (job,), _ = api.store.list_jobs()
    told = batch(*records, first_seq=first_seq)
    assert api.post_events(f"{job.id}-a0", told).status_code == 200


@pytest.fixture
def degraded(api: Api, client: ShardloomClient, monkeypatch: pytest.MonkeyPatch) -> Api:
    """A service whose job lost one of three groups twelve seconds ago."""
    values = {
        "goodput/share": 0.971,
        "goodput/lost_s/start": 14.0,
        "goodput/lost_s/recovery": 3.2,
        "goodput/lost_s/hang": 0.0,
    }
    spread = {"workers": 6, "shard_group_size": 2, "survive": {"hosts": 2}}
    monkeypatch.setattr(jobs.time, "time", lambda: NOW)
    api.start(name="ratings", parallelism=spread)
    monkeypatch.setattr(jobs.time, "time", lambda: NOW + 12)
    rest = (group_member(0), group_member(2))
    report(
        api,
        layout_chosen(),
        workers_started(),
        membership_changed(),
        group_lost(1, time=NOW),
        membership_changed(*rest, generation=4, commit=128),
        recovered(time=NOW + 0.4),
        Metrics(time=NOW, step=1, values=values),
    )
    return api


def shown() -> list[str]:
    """The lines of `show`, with single spaces."""
    return [" ".join(line.split()) for line in shardloom("show", "ratings").stdout.splitlines()]


def test_show_tells_of_groups_and_lost_time(degraded: Api) -> None:
    lines = shown()
    for line in (
        "last recovery commit 310 ms late, nothing to redo, 11s ago; 1 group lost so far",
        "goodput 97.1% since the attempt or its coordinator started; lost: start 2.4%, recovery "
        "0.5%",
        # Every group, the lost one included.
        "0 trains 0 127.0.0.2",
        "1 gone 12s ago (host lost) 0 127.0.0.3",
        "2 trains 0 127.0.0.4",
    ):
        assert line in lines
    assert "RUNNING 2 of 3 groups" in shardloom("ps", "--status", "running").stdout
    report(degraded, membership_changed(time=NOW + 1), first_seq=7)
    assert "copies alive 3 of each shard, on 3 hosts; 2 more may be lost" in shown()
    assert "groups" not in shardloom("ps").stdout


@pytest.mark.usefixtures("client")
def test_show_and_the_api_have_the_plan_beside_what_was_measured(api: Api) -> None:
    job_id = api.start(name="ratings")
    report(api, predicted_workers())
    lines = shown()
    assert "Predicted Measured Ratio" in lines and f"rows/s 1k {NOTHING} {NOTHING}" in lines
    measured = {
        "speed/rows_per_s": 800.0,
        **{f"phase/{phase}_s": 0.01 for phase in ("data_wait", "lookup", "dense", "backward")},
        "phase/sync_s": math.nan,
        "memory/peak_rss_bytes": 8e6,
        "sync/every_steps": 4.0,
    }
    report(api, Metrics(time=NOW, step=1, values=measured), first_seq=1)
    lines = shown()
    for line in (
        f"rows/s 1k 800 0.8{TIMES}",
        f"step 80 ms 40 ms 0.5{TIMES}",
        f"forward and backward 60 ms 30 ms 0.5{TIMES}",
        f"sync 10 ms {NOTHING} {NOTHING}",
        f"sync interval 16 4 0.25{TIMES}",
        f"peak memory 7 MB 8 MB 1.14{TIMES}",
        f"lookup imbalance 1.50{TIMES} {NOTHING} {NOTHING}",
    ):
        assert line in lines
    found = api.http.get(f"/v1/jobs/{job_id}").json()
    assert found["membership"]["prediction"]["memory_bytes"] == dict.fromkeys(MEMORY_PARTS, 10**6)
    first = {
        "name": "rows/s",
        "unit": "per_s",
        "predicted": 1000.0,
        "measured": 800.0,
        "ratio": 0.8,
    }
    assert found["compared"][0] == first
    assert f"0.8{TIMES}</td>" in fragments.sharding(api.store.get_job(job_id), [])


def test_an_ended_job_shows_its_recoveries_and_no_groups(degraded: Api) -> None:
    (job,), _ = degraded.store.list_jobs()
    end(degraded, job.id)
    output = shardloom("show", "ratings").stdout
    assert "commit 310 ms late, nothing to redo" in output
    assert "of 3 groups" not in output
    assert "Standing" not in output


@pytest.mark.usefixtures("client")
def test_show_ends_with_the_evidence_and_what_to_change(api: Api) -> None:
    job_id = api.start(name="ratings", retry={"max_failures": 0})
    evidence = {"rank": "1", "exception": "OutOfMemoryError"}
    told = attempt_ended("device_oom").model_copy(update={"evidence": evidence})
    api.post_events(f"{job_id}-a0", batch(told, stream="driver"))
    api.backend.play(job_id, Script(("failed",)))
    api.poll()
    lines = shown()
    assert {"rank 1", "exception OutOfMemoryError"} <= set(lines)
    assert any("Lower data.batch_size" in line for line in lines)


@pytest.mark.usefixtures("client")
def test_a_job_is_asked_to_resize_and_to_leave_a_host(api: Api) -> None:
    job_id = running(
        api, name="ratings", parallelism={"workers": {"min": 2, "max": 8}, "shard_group_size": 2}
    )
    asked = shardloom("resize", "ratings", "6")
    assert (asked.exit_code, asked.stdout) == (0, "asked for 6 workers\n")
    assert shardloom("resize", "ratings", "0").exit_code == 2
    (host,) = set(workers_started().hosts)
    drained = shardloom("drain", "ratings", host)
    assert drained.stdout == f"asked for 6 workers without {host}\n"
    undone = json.loads(shardloom("drain", "ratings", host, "--undo", "--json").stdout)
    assert (undone["workers"], undone["drain_hosts"]) == (6, [])
    assert api.files(job_id).resize_request_path.exists()
