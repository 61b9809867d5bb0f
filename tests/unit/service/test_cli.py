"""The commands against an in-memory service: output, overrides, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from service.commands import context, stack
from tests.unit.service.api_samples import job_body, problem_body, spec_document
from tests.unit.service.fake_service import shardloom


@pytest.fixture
def spec_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec_document()))
    return str(path)


def test_ps_lists_the_jobs_with_status_progress_and_metric(service):
    result = shardloom("ps")
    assert result.exit_code == 0
    for word in ("job-0000000000ab", "ratings", "RUNNING", "25 %", "validation/rmse 0.9340"):
        assert word in result.stdout


@pytest.mark.parametrize(
    "command", ["ps", "show ratings", "events ratings", "metrics ratings", "checkpoints ratings"]
)
def test_reading_commands_print_json_for_programs(service, command):
    result = shardloom(*command.split(), "--json")
    assert result.exit_code == 0
    assert isinstance(json.loads(result.stdout), (list, dict))


def test_show_tells_layout_progress_and_metrics(service):
    result = shardloom("show", "ratings")
    assert "4 workers (2 replicas x 2 shards)" in result.stdout
    assert "step 50 of 200 (25.0 %), 51.2k rows, 21.3k rows/s, 1m 12s to go" in result.stdout


def test_an_unknown_job_is_refused_with_a_way_on(service):
    result = shardloom("show", "nobody")
    assert result.exit_code == 2
    assert "no job has the id or name 'nobody'" in result.stderr
    assert "shardloom ps" in result.stderr


def test_an_unreachable_service_is_named_with_a_way_to_start_it(service):
    service.is_down = True
    result = shardloom("ps", "--url", "http://elsewhere:9")
    assert result.exit_code == 3
    assert "http://elsewhere:9 (Connection refused)" in result.stderr
    assert "shardloom up" in result.stderr


def test_a_log_line_is_printed_as_it_is(service):
    result = shardloom("logs", "ratings", "--source", "rank-0", "--tail", "5")
    assert "rank-0  step 50 [loss 0.41]" in result.stdout
    assert service.requests[0].url.params["source"] == "rank-0"
    assert service.requests[0].url.params["tail"] == "5"


def test_a_long_log_is_printed_to_its_end(service):
    service.log_pieces = [["one", "two"], ["three"], ["four"]]
    result = shardloom("logs", "ratings", "--tail", "100")
    texts = [line.split()[-1] for line in result.stdout.splitlines()]
    assert texts == ["one", "two", "three", "four"]
    body = json.loads(shardloom("logs", "ratings", "--json").stdout)
    assert [line["text"] for line in body["lines"]] == texts


def test_show_tells_that_the_cluster_does_not_answer(service):
    service.looks = [job_body(status="STARTING", message="no answer from Ray at http://ray:8265")]
    assert "no answer from Ray at http://ray:8265" in shardloom("show", "ratings").stdout


def test_metrics_show_latest_extremes_and_curve(service):
    points = [
        {"step": step, "time": 1.0, "value": value, "min": value - 0.1, "max": value + 0.1}
        for step, value in ((10, 2.0), (20, 1.0))
    ]
    service.metrics = {
        "names": ["train/loss"],
        "series": [{"name": "train/loss", "points": points}],
    }
    line = shardloom("metrics", "ratings").stdout.splitlines()[1]
    assert line.split() == ["train/loss", "1.000", "0.9000", "2.100", "20", "█▁"]


def test_an_unknown_metric_is_refused_and_the_known_ones_named(service):
    service.metrics = {"names": ["train/loss"], "series": []}
    result = shardloom("metrics", "ratings", "--name", "train/lose")
    assert result.exit_code == 2
    assert "train/loss" in result.stderr


def test_checkpoints_show_size_and_the_best(service):
    service.checkpoints = [
        {
            "step": 1200,
            "path": "/runs/x/checkpoints/step-00001200",
            "size_bytes": 12_345_678,
            "created_at": 0.0,
            "is_best": True,
            "metrics": {"validation/rmse": 0.91},
        }
    ]
    result = shardloom("checkpoints", "ratings")
    for word in ("1,200", "best", "12.3 MB", "0.9100", "step-00001200"):
        assert word in result.stdout


def test_submit_prints_the_id_alone_and_applies_overrides(service, spec_file):
    result = shardloom("submit", spec_file, "--set", "training.epochs=3", "--set", "name=other")
    assert result.exit_code == 0
    assert result.stdout == "job-0000000000ab\n"
    assert service.submitted[0]["training"]["epochs"] == 3
    assert service.submitted[0]["name"] == "other"


def test_a_relative_data_path_is_made_absolute_and_a_url_is_not(service, spec_file, tmp_path):
    shardloom("submit", spec_file, "--set", "data.path=prepared/../ratings")
    shardloom("submit", spec_file, "--set", "data.path=s3://bucket/ratings")
    assert service.submitted[0]["data"]["path"] == str(tmp_path / "ratings")
    assert service.submitted[1]["data"]["path"] == "s3://bucket/ratings"


def test_a_spec_can_come_from_standard_input(service, tmp_path):
    result = shardloom("submit", "-", stdin=yaml.safe_dump(spec_document()))
    assert result.exit_code == 0
    assert service.submitted[0]["name"] == "ratings"


def test_a_missing_spec_file_is_a_usage_error(service):
    result = shardloom("submit", "nowhere.yaml")
    assert result.exit_code == 2
    assert "nowhere.yaml" in result.stderr


@pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 130)])
def test_submit_wait_mirrors_the_job_in_its_exit_code(service, spec_file, status, code):
    service.looks = [job_body(), job_body(), job_body(status=status, message="why")]
    result = shardloom("submit", spec_file, "--wait")
    assert result.exit_code == code
    assert result.stdout == "job-0000000000ab\n"


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


def test_cancel_says_which_job(service):
    result = shardloom("cancel", "ratings")
    assert result.exit_code == 0
    assert "job-0000000000ab (ratings) is being cancelled" in result.stdout
    assert service.requests[-1].url.path == "/v1/jobs/ratings:cancel"


def test_spec_check_lists_every_fault_and_needs_no_service(spec_file):
    result = shardloom("spec", "check", spec_file, "--set", "parallelism.workers=3", "--set", "x=1")
    assert result.exit_code == 2
    assert "the spec has 2 faults:" in result.stderr
    assert "multiple of shard_group_size" in result.stderr


def test_spec_check_accepts_a_good_spec_and_schema_describes_it(spec_file):
    assert shardloom("spec", "check", spec_file).exit_code == 0
    schema = json.loads(shardloom("spec", "schema").stdout)
    assert "embedding_tables" in schema["properties"]


def test_run_refuses_a_faulty_spec_before_it_starts_anything(service, spec_file, monkeypatch):
    started = []
    monkeypatch.setattr(stack, "ensure_running", lambda: started.append(True))
    assert shardloom("run", spec_file, "--set", "training.epochs=-1").exit_code == 2
    assert started == []


@pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 130)])
def test_run_starts_the_stack_follows_and_mirrors_the_job(
    service, spec_file, monkeypatch, status, code
):
    started = []
    monkeypatch.setattr(stack, "ensure_running", lambda: started.append(True))
    service.looks = [job_body(status=status, ended_at=1010.0, message="the reason")]
    result = shardloom("run", spec_file)
    assert result.exit_code == code
    assert started == [True]
    assert "line 1" in result.stdout
    assert f"{status} after 8.0s" in result.stdout
    assert "validation  rmse 0.9340" in result.stdout
    assert ("the reason" in result.stdout) == (code != 0)


def test_run_with_a_url_starts_nothing(service, spec_file, monkeypatch):
    monkeypatch.setattr(stack, "ensure_running", lambda: pytest.fail("started a stack"))
    service.looks = [job_body(status="SUCCEEDED")]
    assert shardloom("run", spec_file, "--url", "http://elsewhere:1").exit_code == 0


def test_ctrl_c_while_following_detaches_and_says_how_to_come_back(service, monkeypatch):
    def interrupt(job_id, **_):
        raise KeyboardInterrupt

    client = service.client()
    monkeypatch.setattr(client, "iter_events", interrupt)
    monkeypatch.setattr(context, "open_client", lambda url: client)
    result = shardloom("follow", "ratings")
    assert result.exit_code == 4
    assert "the job goes on" in result.stdout
    for command in ("follow", "logs -f", "show", "cancel"):
        assert f"shardloom {command} job-0000000000ab" in result.stdout
    assert all(request.method == "GET" for request in service.requests)


def test_down_without_a_stack_says_so(service):
    result = shardloom("down")
    assert (result.exit_code, result.stdout) == (0, "nothing was running\n")


def test_a_home_that_can_be_no_folder_is_named_and_is_no_failed_job(service, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path / "file" / "home"))
    result = shardloom("up")
    assert result.exit_code == 3
    assert "SHARDLOOM_HOME" in result.stderr


def test_status_fails_when_nobody_answers(service):
    service.is_down = True
    result = shardloom("status", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["service_alive"] is False


def test_the_cli_imports_nothing_heavy():
    heavy = ["torch", "ray", "fastapi", "sqlalchemy", "polars", "pyarrow", "numpy"]
    code = f"import sys, service.cli as c; c.build_app(); print(set({heavy}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
