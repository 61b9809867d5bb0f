"""Plans: layouts side by side, TorchRec's planner behind a process, what is refused, and when."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from service.api.routers import plans as plans_routes
from service.dashboard import fragments
from service.errors import PlannerFailed, PlanTimedOut
from service.jobs import planning as planning_module
from service.jobs.planning import GroupPlanner, Limit
from service.schemas.jobs import JobPlan
from service.schemas.plans import PlansOut
from service.settings import Settings
from tests.harness.builders import NOW, batch, predicted_workers, spec, spec_document
from tests.harness.service import Api, end, problem_in, shardloom
from tests.harness.wait import scaled, wait_for
from trainer.layout.cost import cpu_cluster
from trainer.layout.hosts import HostFacts
from trainer.layout.workload import GroupTopology
from trainer.protocol.events import Metrics
from trainer.spec.job import JobSpec

GIB = 2**30
CPU = "4xCPU-8GB x 2"
AUTOMATIC = {"workers": 8, "shard_group_size": "auto", "placement": "auto"}
# Puts all tables on the first rank, without torch.
FIRST_RANK = """
import json, sys
from trainer.layout.workload import GroupPlan, TablePlacement, rank_loads
from trainer.spec.job import JobSpec

print(flush=True)
for line in sys.stdin:
    task = json.loads(line)
    spec = JobSpec.checked(task["spec"], {"stored": True})
    size, tables = task["topology"]["shard_group_size"], spec.embedding_tables
    common = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": (0,)}
    placements = tuple(TablePlacement(name=table.name, **common) for table in tables)
    shards = {table.name: [(0, table.num_embeddings, table.embedding_dim)] for table in tables}
    plan = GroupPlan(tables=placements, ranks=rank_loads(spec, size, placements, shards))
    print(plan.model_dump_json(), flush=True)
"""
# Hangs in the midst of its answer.
HANGS = "import time; print(); print('{', end='', flush=True); time.sleep(600)"


class Script:
    """Stands in for the trainer's process: runs a program in its place."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:3] == ["-m", "trainer.parallel.group_planner"]
        process = subprocess.Popen([sys.executable, "-c", self.program], **options)
        self.processes.append(process)
        return process


def job(workers: int = 2, **changes: Any) -> JobSpec:
    return spec(parallelism={"workers": workers, "shard_group_size": workers}, **changes)


def group(**changes: Any) -> GroupTopology:
    known = {
        "shard_group_size": 2,
        "ranks_per_host": 2,
        "device": "cpu",
        "memory_bytes": GIB,
        "memory_bytes_per_s": 1e10,
        "intra_host_bytes_per_s": 1e9,
        "inter_host_bytes_per_s": 1e8,
    }
    return GroupTopology(**known | changes)


@pytest.fixture
def planning(api: Api) -> Iterator[Callable[[str], Script]]:
    """Has the app plan by a program."""
    state = api.http.app.state

    def plan_by(program: str) -> Script:
        script = Script(program)
        state.context = replace(state.context, planner=GroupPlanner(api.settings, script))
        return script

    yield plan_by
    state.context.planner.close()


def asked(api: Api, cluster: Any = CPU, limit_s: float = 60, **changes: Any) -> Any:
    """The answer to a request for a plan."""
    document = spec_document(**{"parallelism": AUTOMATIC} | changes)
    body = {"spec": document, "cluster": cluster, "time_limit_s": limit_s}
    return api.http.post("/v1/plans", json=body)


# ---- the process


def test_the_trainers_planner_shards_a_group_in_a_process_of_its_own(
    app_settings: Settings,
) -> None:
    limit = Limit(scaled(120))
    tasks = [(job(), group()), (job(), group(memory_bytes=100))]
    with closing(GroupPlanner(app_settings)) as planner:
        (plan,), (impossible,) = (planner.plan([task], limit) for task in tasks)
    (users,) = plan.tables
    held = [(rank.tables_bytes, rank.optimizer_bytes) for rank in plan.ranks]
    assert users.name == "users" and users.sharding_type in ("row_wise", "table_wise")
    assert (sum(weights for weights, _ in held), sum(state for _, state in held)) == (3200, 400)
    assert sum(rank.lookup_bytes for rank in plan.ranks) > 0
    assert "no sharding plan fits" in impossible.obstacle and not impossible.tables


def test_a_plan_is_made_once_for_the_same_tables_layout_memory_and_links(
    app_settings: Settings,
) -> None:
    script = Script(FIRST_RANK)
    with closing(GroupPlanner(app_settings, script)) as planner:
        (first,) = planner.plan([(job(), group())], Limit(scaled(60)))
        assert planner.plan([(job(name="another"), group())], Limit(scaled(60)))[0] is first
        one, two = planner.plan(
            [(job(), group()), (job(), group(memory_bytes=GIB // 2))], Limit(scaled(60))
        )
        assert one is first and two is not first
        (process,) = script.processes
        process.kill()
        process.wait()
        (three,) = planner.plan([(job(), group(memory_bytes=GIB // 3))], Limit(scaled(60)))
        assert three == two and len(script.processes) == 2, "one that has ended is replaced"


def test_other_groups_are_planned_only_soon_after_the_recommended_one(
    app_settings: Settings,
) -> None:
    tasks = [(job(), group()), (job(), group(memory_bytes=GIB // 2))]
    with (
        closing(GroupPlanner(app_settings, Script(FIRST_RANK))) as planner,
        patch.object(planning_module, "_OTHERS_S", -1.0),
    ):
        assert len(planner.plan(tasks, Limit(scaled(60)))) == 1


def test_a_loaded_process_is_there_from_the_start_and_again_when_one_has_ended(
    app_settings: Settings,
) -> None:
    script, kept = Script(FIRST_RANK), app_settings.model_copy(update={"keep_planner": True})
    with (
        closing(GroupPlanner(kept, script)) as planner,
        patch.object(planning_module, "_GRACE_S", scaled(5)),
    ):
        planner.start()
        (first,) = script.processes
        planner.plan([(job(), group())], Limit(scaled(60)))
        nobody_waits = Limit(scaled(60))
        nobody_waits.cancelled.set()
        planner.plan([(job(), group(memory_bytes=GIB // 2))], nobody_waits)
        planner.plan([(job(), group(memory_bytes=GIB // 4))], Limit(scaled(60)))
        assert script.processes == [first], "what it was at took no time"
        script.program = HANGS
        first.kill()
        first.wait()
        with pytest.raises(PlanTimedOut):
            planner.plan([(job(), group(memory_bytes=GIB // 3))], Limit(scaled(1)))
        _, killed, waiting = script.processes
        assert killed.poll() is not None and waiting.poll() is None
    assert waiting.poll() is not None
    GroupPlanner(app_settings, script).start()
    assert len(script.processes) == 3


def test_the_service_loads_the_planner_when_it_starts(api: Api) -> None:
    script, state = Script(FIRST_RANK), api.http.app.state
    kept = api.settings.model_copy(update={"keep_planner": True})
    state.context = replace(state.context, planner=GroupPlanner(kept, script))
    with api.http:
        (process,) = script.processes
        assert process.poll() is None
    assert process.poll() is not None


def test_a_process_that_is_being_loaded_outlives_those_who_wait_for_it(
    app_settings: Settings, tmp_path: Path
) -> None:
    may_load = tmp_path / "may-load"
    waits = f"import os, time\nwhile not os.path.exists({str(may_load)!r}): time.sleep(0.01)"
    script = Script(f"{waits}\n{FIRST_RANK}")
    with closing(GroupPlanner(app_settings, script)) as planner:
        with pytest.raises(PlanTimedOut):
            planner.plan([(job(), group())], Limit(0.1))
        may_load.touch()
        planner.plan([(job(), group())], Limit(scaled(60)))
        assert len(script.processes) == 1


def test_a_process_is_killed_when_time_is_over_or_nobody_waits(app_settings: Settings) -> None:
    script = Script(HANGS)
    planner = GroupPlanner(app_settings, script)
    with pytest.raises(PlanTimedOut, match=f"{scaled(1):g} s"):
        planner.plan([(job(), group())], Limit(scaled(1)))
    limit, began = Limit(600), time.monotonic()
    canceller = threading.Timer(scaled(0.5), limit.cancelled.set)
    canceller.start()
    with patch.object(planning_module, "_GRACE_S", 0.2), pytest.raises(PlanTimedOut):
        planner.plan([(job(), group())], limit)
    assert time.monotonic() - began < scaled(60)
    assert all(process.poll() is not None for process in script.processes)


def test_a_process_that_fails_says_why(app_settings: Settings) -> None:
    broken = GroupPlanner(app_settings, Script("raise SystemExit('no module named torch')"))
    with pytest.raises(PlannerFailed, match="code 1: no module named torch"):
        broken.plan([(job(), group())], Limit(scaled(60)))
    nowhere = GroupPlanner(app_settings.model_copy(update={"trainer_python": "/nowhere/python"}))
    with pytest.raises(PlannerFailed, match="/nowhere/python cannot be started"):
        nowhere.plan([(job(), group())], Limit(scaled(60)))


# ---- over REST


def test_plans_compare_layouts_and_shard_the_recommended_one(
    api: Api, planning: Callable[[str], Script]
) -> None:
    planning(FIRST_RANK)
    response = asked(api)
    assert response.status_code == 200, response.text
    found = response.json()
    best = found["recommended"]
    shown = [each for each in found["candidates"] if each["is_recommended"]]
    assert shown == [best["candidate"]] and best["candidate"]["is_planned"]
    size, copies = best["candidate"]["shard_group_size"], best["candidate"]["num_replicas"]
    assert [len(part) for part in best["sharding_groups"]] == [size] * copies
    assert [len(part) for part in best["hosts"]] == [size] * copies
    assert len(best["ranks"]) == size and best["tables"][0]["ranks"] in ([0], None)
    assert best["ranks"][0]["tables_bytes"] == 3200 and best["ranks"][0]["process_bytes"] > 0
    assert found["reason"] and found["changes"] == []
    assert {each["placement"] for each in found["candidates"]} == {"intra_host", "inter_host"}
    parts = ("input_dist_s", "lookup_s", "output_dist_s", "dense_s", "sync_s", "host_s")
    for each in found["candidates"]:
        seconds = sum(each["step"][part] for part in parts)
        assert each["samples_per_s"] == pytest.approx(8 * found["batch_size"] / seconds)


def test_a_plan_is_for_the_services_own_cluster_unless_one_is_described(
    api: Api, planning: Callable[[str], Script]
) -> None:
    planning(FIRST_RANK)
    api.backend.set_hosts(HostFacts("a", 4, 0, 8 * GIB), HostFacts("b", 2, 0, 8 * GIB))
    elastic = {**AUTOMATIC, "workers": {"min": 2, "max": 8}}
    found = asked(api, None, parallelism=elastic).json()
    assert (found["room"], found["cluster"]["hbm_bytes"]) == ([4, 2], 2 * GIB)
    assert {each["world_size"] for each in found["candidates"]} == {6}
    found = asked(api, f"4xCPU-8GB x 3, hbm_bytes={GIB}").json()
    assert (found["room"], found["cluster"]["hbm_bytes"]) == ([4] * 3, GIB)


def test_what_jobs_measured_on_the_cluster_calibrates_its_next_plan(
    api: Api, planning: Callable[[str], Script]
) -> None:
    planning(FIRST_RANK)
    api.backend.set_hosts(HostFacts("a", 4, 0, 8 * GIB))
    four = {**AUTOMATIC, "workers": 4}
    plain = asked(api, None, parallelism=four).json()
    assert plain["calibration"] is None
    here = cpu_cluster(4, GIB).fingerprint
    # Predicted were 80 ms and 7 MB.
    for index, (seconds, megabytes, cluster) in enumerate(
        [(0.16, 300, here), (0.24, 308, here), (80.0, 10**6, "elsewhere")]
    ):
        job_id = api.start(name=f"measured-{index}")
        foretold = predicted_workers().prediction.model_copy(update={"cluster": cluster})
        values = {"phase/backward_s": seconds, "memory/peak_rss_bytes": megabytes * 1e6}
        told = batch(
            predicted_workers(prediction=foretold), Metrics(time=NOW, step=1, values=values)
        )
        api.post_events(f"{job_id}-a0", told)
        end(api, job_id)
    found = asked(api, None, parallelism=four).json()
    assert found["calibration"] == {"num_jobs": 2, "step_ratio": 2.5, "extra_bytes": 2**28}
    before, after = (answer["recommended"]["candidate"] for answer in (plain, found))
    assert after["samples_per_s"] == pytest.approx(before["samples_per_s"] / 2.5)
    assert after["peak"]["process_bytes"] == before["peak"]["process_bytes"] + 2**28
    assert asked(api).json()["calibration"] is None, "of another cluster nothing was measured"


def test_where_nothing_fits_the_answer_is_what_would(
    api: Api, planning: Callable[[str], Script]
) -> None:
    script = planning(FIRST_RANK)
    large = [{"name": "users", "num_embeddings": 10**9, "embedding_dim": 8}]
    found = asked(api, "8xH100-80GB x 1, hbm_bytes=1e9", embedding_tables=large).json()
    assert found["recommended"] is None and "no layout fits in memory" in found["reason"]
    assert script.processes == []
    more = [each["set"] for each in found["changes"] if "parallelism.workers" in each["set"]]
    assert found["changes"] and more == [], "the cluster has one host"
    endless = asked(api, "8xH100-80GB, hbm_bytes=1e9", embedding_tables=large).json()
    changes = [each["set"].get("parallelism.workers") for each in endless["changes"]]
    assert 64 in changes


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("8xB9000", "is no cluster"),
        ("3xCPU-8GB", "do not fill hosts of 3"),
        ("1xCPU-8GB x 2", "room for 2"),
    ],
)
def test_clusters_that_cannot_be_are_refused(
    api: Api, planning: Callable[[str], Script], cluster: str, words: str
) -> None:
    planning(FIRST_RANK)
    assert words in problem_in(asked(api, cluster), 422, "no_plan")["detail"]


def test_specs_that_cannot_be_planned_are_refused(
    api: Api, planning: Callable[[str], Script], tmp_path: Path
) -> None:
    planning(HANGS)
    odd = asked(api, parallelism={"workers": 6, "shard_group_size": 4})
    assert "multiple of shard_group_size" in problem_in(odd, 422, "invalid_spec")["detail"]
    data = {"path": str(tmp_path), "label": {"column": "rating"}}
    unknown = asked(api, data=data, embedding_tables=[{"name": "users", "embedding_dim": 8}])
    assert "sizes of all tables" in problem_in(unknown, 422, "invalid_spec")["detail"]
    problem_in(
        api.http.post("/v1/plans", json={"spec": {}, "time_limit_s": 0}), 422, "invalid_request"
    )
    late = problem_in(asked(api, limit_s=0.5), 504, "plan_timed_out")
    assert "time_limit_s" in late["detail"]


def test_a_plan_takes_none_of_the_threads_of_the_api(
    api: Api, planning: Callable[[str], Script]
) -> None:
    planning(FIRST_RANK)
    body = {"spec": spec_document(parallelism=AUTOMATIC), "cluster": CPU}
    assert api.status_without_a_free_thread("POST", "/v1/plans", json=body) == 200


def test_a_caller_who_hangs_up_ends_the_process(
    api: Api, planning: Callable[[str], Script], tmp_path: Path
) -> None:
    # One that is still being loaded would outlive its caller.
    asked = tmp_path / "asked"
    script = planning(
        "import pathlib, sys, time; print(flush=True); sys.stdin.readline(); "
        f"pathlib.Path({str(asked)!r}).touch(); time.sleep(600)"
    )
    body = json.dumps({"spec": spec_document(parallelism=AUTOMATIC), "cluster": CPU}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        while not asked.exists():
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    api.post_raw("/v1/plans", receive)
    (process,) = script.processes
    wait_for(lambda: process.poll() is not None, "the process to end")


# ---- at submit


def test_a_job_whose_tables_fit_no_worker_is_refused_with_advice_unless_forced(api: Api) -> None:
    api.backend.set_hosts(HostFacts("a", 4, 0, 4 * GIB))
    large = [{"name": "users", "num_embeddings": 19 * 10**7, "embedding_dim": 8}]
    body = {"spec": spec_document(embedding_tables=large)}
    problem = problem_in(api.http.post("/v1/jobs", json=body), 422, "does_not_fit")
    assert "one copy of the tables takes" in problem["detail"]
    assert "force=true" in problem["detail"]
    assert [each["set"] for each in problem["changes"]] == [
        {"parallelism.workers": 8, "parallelism.shard_group_size": "auto"}
    ]
    assert api.http.get("/v1/jobs").json()["items"] == []
    forced = api.http.post("/v1/jobs?force=true", json=body)
    assert forced.status_code == 201
    again = api.http.post(f"/v1/jobs/{forced.json()['id']}:clone", json={"name": "again"})
    problem_in(again, 422, "does_not_fit")


# ---- in the browser


def drawn(api: Api, cluster: str = CPU, **changes: Any) -> str:
    """The plan on the page of a new job."""
    document = spec_document(**{"parallelism": AUTOMATIC} | changes)
    plan = api.http.post("/v1/jobs?dry_run=true", json={"spec": document}).json()
    plans = PlansOut.model_validate(asked(api, cluster, **changes).json())
    return fragments.render("plan.html", plan=JobPlan.model_validate(plan), plans=plans, why="")


def test_the_page_of_a_new_job_draws_the_grid_memory_and_candidates(
    api: Api, planning: Callable[[str], Script]
) -> None:
    planning(FIRST_RANK)
    html = drawn(api)
    size = asked(api).json()["recommended"]["candidate"]["shard_group_size"]
    assert html.count('class="load memory"') == size and 'title="rank 0 on host 0"' in html
    assert html.count('class="chosen"') == 1 and "rows at risk" in html
    large = [{"name": "users", "num_embeddings": 10**9, "embedding_dim": 8}]
    html = drawn(api, "8xH100-80GB x 1, hbm_bytes=1e9", embedding_tables=large)
    assert "What would do:<ul><li>" in html and "does not fit" in html and "load memory" not in html


# ---- in the terminal


@pytest.mark.usefixtures("client")
def test_plan_shows_the_grid_memory_and_candidates(
    planning: Callable[[str], Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning(FIRST_RANK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("job.yaml").write_text(yaml.safe_dump(spec_document(parallelism=AUTOMATIC)))
    page = shardloom("plan", "job.yaml", "--cluster", CPU)
    assert page.exit_code == 0, page.output
    for words in ("recommended", "Shard 0", "0 @0", "Optimizer", "Rows at risk", "nothing was"):
        assert words in page.stdout
    found = json.loads(shardloom("plan", "job.yaml", "--cluster", CPU, "--json").stdout)
    assert found["recommended"]["candidate"]["is_recommended"]
    plain = shardloom("plan", "job.yaml")
    assert plain.exit_code == 0 and "not estimated: no host of the cluster" in plain.stdout
    assert json.loads(shardloom("plan", "job.yaml", "--json").stdout)["plans"] is None
    with patch.object(plans_routes, "_planned", side_effect=PlanTimedOut(60)):
        late = shardloom("plan", "job.yaml")
    assert late.exit_code == 0 and "8 workers (auto)" in late.stdout
    assert "not estimated: the plan was not done" in late.stdout and "--time-limit" in late.stdout
    refused = shardloom("plan", "job.yaml", "--cluster", "8xH100-80GB, hbm_bytes=0")
    assert refused.exit_code == 2 and "hbm_bytes is 0" in refused.stderr
