"""The dashboard in a real browser: what it shows, and that it follows the store by itself."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from service import storage
from service.dashboard import compare, fragments, panels, spec_text
from service.dashboard.jobs import PAGE_SIZE, ListFeed
from service.dashboard.rest import Rest
from service.db.jobs import JobStore
from service.db.sweeps import SweepStore
from service.domain.job_filter import JobFilter
from service.domain.models import Job, JobStatus
from service.domain.sweeps import Parameter, Sweep, Trial
from service.errors import StoreUnavailable
from service.jobs import run_storage
from service.jobs.logs import list_sources
from service.storage import in_time
from tests.e2e.conftest import (
    LIVE_MS,
    Dashboard,
    files_of,
    open_job,
    serious_faults,
    start_job,
    tell,
)
from tests.harness.builders import (
    checkpoint,
    metrics,
    progress,
    queued_job,
    row_wise_plan,
    spec_document,
    table_wise_plan,
    trace_written,
    workers_started,
)
from tests.harness.databases import store_job
from tests.harness.wait import scaled, wait_for
from trainer.export.artifact import write_manifest
from trainer.export.requests import list_exports
from trainer.protocol.events import Event
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.spec.parse import parse_document


def submit(dashboard: Dashboard, name: str) -> Job:
    """Store a queued job that was submitted a minute ago."""
    return store_job(dashboard.store, queued_job(now=time.time() - 60, name=name))


def store_sweep(dashboard: Dashboard, metric: str, *trials: tuple[Any, str]) -> None:
    """Store sweep-1, which has tried these epochs, each with a job."""
    searched = (Parameter("training.epochs", values=(*(value for value, _ in trials), 9)),)
    sweeps = SweepStore(dashboard.store.engine)
    sweeps.create(Sweep("sweep-1", "lr", {}, searched, metric, len(trials), time.time()))
    for number, (value, job_id) in enumerate(trials):
        values = {"training.epochs": value}
        sweeps.add_trial(Trial("sweep-1", number, values, time.time(), job_id=job_id))


def training_records(step: int) -> list[Event]:
    """What a worker reports until `step`, every 10 steps."""
    records: list[Event] = [
        workers_started(tables=[row_wise_plan("users"), table_wise_plan("movies", 1)])
    ]
    for at in range(10, step + 1, 10):
        values = {"train_loss": 1.0 / at, "train_rmse": 1.0, "speed_rows_per_s": 16_540.0}
        values |= {"phase_dense_s": 0.01, "phase_backward_s": 0.02, "sync_time_s": 0.04}
        records += [metrics(at, **values), progress(at)]
    return [*records, metrics(step, validation_rmse=0.91), checkpoint(step, is_best=True)]


@pytest.fixture
def running(dashboard: Dashboard) -> Job:
    """A job at step 40 of 100 that has written logs."""
    job = start_job(dashboard.store, "wide-and-deep")
    tell(dashboard.store, job, *training_records(40))
    files = files_of(dashboard, job)
    files.logs_dir.mkdir(parents=True)
    files.log_path("driver").write_text("driver is up\n")
    files.log_path("rank-0").write_text("step 40 loss 0.025\n")
    return dashboard.store.get_job(job.id)


def settled_picture(chart: Locator) -> bytes:
    """A picture of a chart once two in a row are the same, so that it has drawn what it has."""
    expect(chart.locator("canvas")).to_be_visible()
    previous, picture = b"", chart.screenshot()
    deadline = time.monotonic() + LIVE_MS / 1000
    while picture != previous:
        assert time.monotonic() < deadline, "the chart kept changing"
        previous, picture = picture, chart.screenshot()
    return picture


def test_the_list_shows_jobs_follows_them_and_leads_to_their_pages(
    page: Page, dashboard: Dashboard, running: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_spark, reads, may_read = ListFeed.read_spark, list[str](), threading.Event()

    def held(feed: ListFeed, job: Job) -> None:
        reads.append(job.id)
        may_read.wait(scaled(60))
        read_spark(feed, job)

    monkeypatch.setattr(ListFeed, "read_spark", held)
    page.goto("/")
    row = page.get_by_role("row").filter(has_text=running.id)
    expect(row).to_contain_text("running")
    expect(row).to_contain_text("4 = 2 × 2")  # noqa: RUF001
    expect(row).to_contain_text("40%")
    for step in (50, 60):
        tell(dashboard.store, running, progress(step))
        expect(row).to_contain_text(f"{step}%", timeout=LIVE_MS)
    assert len(reads) == 1, "curves are read by one thread at a time"
    may_read.set()
    expect(row.locator(".job-spark path")).to_have_count(1, timeout=LIVE_MS)
    link = row.get_by_role("link")
    link.evaluate("link => { link.isAsBefore = true }")
    link.hover()
    page.mouse.down()
    tell(dashboard.store, running, progress(70))
    expect(row).to_contain_text("70%", timeout=LIVE_MS)
    assert link.evaluate("link => link.isAsBefore"), "a row is not drawn anew"
    page.mouse.up()
    expect(page).to_have_url(f"{dashboard.url}/dashboard/jobs/{running.id}")


def test_jobs_are_found_selected_and_compared(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    other = start_job(dashboard.store, "nightly", training={"epochs": 3})
    tell(dashboard.store, other, *training_records(60))
    submit(dashboard, "waiting")
    page.goto("/dashboard/?status=starting&status=running")
    rows = page.locator(".job-row")
    expect(rows).to_have_count(2)
    page.get_by_label("Search name or id").fill("NIGHT")
    expect(rows).to_have_count(1)
    expect(page).to_have_url(re.compile("search=NIGHT"))
    page.get_by_label("Search name or id").fill("")
    page.get_by_label("Metric").fill("validation/rmse<0.5")
    expect(page.get_by_text("No job matches")).to_be_visible()
    page.get_by_label("Metric").fill("validation/rmse<0.95")
    expect(rows).to_have_count(2)
    page.get_by_role("checkbox", name="Select all").click()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".compared tbody tr")).to_have_count(2)
    expect(page.locator(".compared")).to_contain_text("0.9100")
    expect(page.locator(".differences tbody tr")).to_have_text(
        [re.compile("name.*nightly"), re.compile("training.epochs.*3.*1")]
    )
    page.get_by_role("combobox", name="Metrics").click()
    page.get_by_role("option", name="train/rmse").click()
    page.keyboard.press("Escape")
    expect(page).to_have_url(re.compile("metrics="))
    chart = page.locator(".chart-panel", has_text="train/loss")
    before = settled_picture(chart)
    page.get_by_role("combobox", name="Axis").click()
    page.get_by_role("option", name="rows").click()
    expect(page).to_have_url(re.compile("x=rows"))
    assert settled_picture(chart) != before
    with page.expect_download() as download:
        chart.get_by_role("button", name="CSV").click()
    assert download.value.path().read_text().startswith("job,step,time,train/loss")
    left_out = page.url.replace(f"{other.id},", "").replace(f",{other.id}", "")
    page.get_by_role("link", name="Leave out nightly").click()
    expect(page).to_have_url(left_out)
    expect(page.locator(".compared tbody tr")).to_have_count(1)
    page.get_by_label("Add a job").fill(running.name)
    page.get_by_role("button", name="Add").click()
    expect(page).to_have_url(re.compile(running.name))
    expect(page.locator(".compared tbody tr")).to_have_count(1)
    page.goto(f"/dashboard/compare?jobs={','.join(f'job-{number}' for number in range(21))}")
    expect(page.get_by_text("Only the first 20 are compared")).to_be_visible()
    page.goto("/dashboard/?metric=a%3C")  # half a filter
    expect(page.get_by_text("as in validation/rmse<0.9")).to_be_visible()
    expect(page.get_by_text("No job matches")).to_be_visible()
    expect(page.get_by_text("No jobs yet")).not_to_be_visible()
    page.get_by_label("Metric", exact=True).fill("")
    expect(page.get_by_role("row").filter(has_text=running.id)).to_be_visible(timeout=LIVE_MS)


def test_a_comparison_follows_its_jobs_and_is_read_on_after_a_fault_of_the_store(
    page: Page, dashboard: Dashboard, running: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_REFRESH_S", 0.2)
    monkeypatch.setattr(compare, "_PAUSE_RATIO", 0)
    page.goto(f"/dashboard/compare?jobs={running.id}")
    results, told = page.locator(".compared"), page.get_by_text("The curves cannot be read")
    expect(results).to_contain_text("0.9100", timeout=LIVE_MS)
    with monkeypatch.context() as away:
        away.setattr(dashboard.store, "get_job", Mock(side_effect=StoreUnavailable("locked")))
        expect(told).to_be_visible(timeout=LIVE_MS)
    chart = page.locator(".chart-panel", has_text="train/loss")
    before = settled_picture(chart)
    tell(dashboard.store, running, metrics(60, train_loss=2.0, validation_rmse=0.82))
    expect(results).to_contain_text("0.8200", timeout=LIVE_MS)
    assert settled_picture(chart) != before
    ended = replace(dashboard.store.get_job(running.id), status=JobStatus.FAILED, message="broke")
    dashboard.store.update_job(ended)
    expect(results).to_contain_text("failed", timeout=LIVE_MS)
    fresh = start_job(dashboard.store, "fresh")
    page.goto(f"/dashboard/compare?jobs={fresh.id}")
    expect(results).to_contain_text("fresh", timeout=LIVE_MS)
    tell(dashboard.store, fresh, metrics(10, train_loss=0.5))
    expect(page.locator(".chart-panel", has_text="train/loss")).to_be_visible(timeout=LIVE_MS)


def test_two_quick_clicks_turn_one_page_the_way_back_is_one_click_and_the_theme_is_remembered(
    page: Page, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_jobs, clicked = JobStore.list_jobs, threading.Event()

    def held(store: JobStore, wanted: JobFilter, **options: Any) -> Any:
        if wanted.after:
            clicked.wait(scaled(60))
        return list_jobs(store, wanted, **options)

    monkeypatch.setattr(JobStore, "list_jobs", held)
    for number in range(PAGE_SIZE + 1):
        store_job(dashboard.store, queued_job(now=time.time() - 100 + number))
    page.goto("/dashboard/")
    rows = page.locator(".job-row")
    expect(rows).to_have_count(PAGE_SIZE)
    page.get_by_role("button", name="Older").dblclick()
    page.get_by_role("button", name="Switch theme").click()
    expect(page.locator("body.body--dark")).to_be_visible()  # So both clicks have come.
    clicked.set()
    expect(rows).to_have_count(1, timeout=LIVE_MS)
    page.get_by_role("button", name="Newer").click()
    expect(rows).to_have_count(PAGE_SIZE, timeout=LIVE_MS)
    page.reload()
    expect(page.locator("body.body--dark")).to_be_visible()


def test_pages_say_why_they_cannot_be_read_while_the_store_is_away(
    page: Page, dashboard: Dashboard, running: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_sweep(dashboard, "train/loss", (1, running.id), (2, "job-deleted"))
    page.goto("/dashboard/sweeps/sweep-1")
    expect(page.get_by_text("deleted")).to_be_visible()
    expect(page.get_by_role("link", name="Compare the best")).to_have_count(0)
    locked = Mock(side_effect=StoreUnavailable("it is locked"))
    for store, name in (
        *((JobStore, each) for each in ("get_job", "list_jobs", "list_live_jobs")),
        *((SweepStore, each) for each in ("get", "list_sweeps")),
    ):
        monkeypatch.setattr(store, name, locked)
    for path, status in (
        *((f"jobs/{running.id}", 503), (f"compare?jobs={running.id}", 503), ("sweeps/x", 503)),
        *(("new?source=x", 503), ("", 200), ("sweeps", 200), ("cluster", 200)),
    ):
        answer = page.request.get(f"{dashboard.url}/dashboard/{path}")
        assert (answer.status, "it is locked" in answer.text()) == (status, True), path
    expect(page.get_by_text("What is shown is old")).to_be_visible(timeout=LIVE_MS)


def test_a_new_job_begins_with_a_copy_an_example_or_nothing(
    page: Page, dashboard: Dashboard, running: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    example = parse_document(spec_text.templates()["movielens.yaml"])
    example["data"]["path"] = "/known"
    tell(dashboard.store, start_job(dashboard.store, **example), workers_started())
    page.goto(f"/dashboard/new?source={running.id}")
    editor = page.get_by_label("Spec", exact=True)
    for chosen, text in (
        ("examples/movielens.yaml", "The demo"),
        ("examples/movielens-survive.yaml", "/known"),
        (f"copy of {running.id}", running.name),
    ):
        page.get_by_role("combobox", name="Begin with").click()
        page.get_by_role("option", name=chosen).click()
        expect(editor).to_contain_text(text)
    with monkeypatch.context() as away:
        away.setattr(dashboard.store, "list_jobs", Mock(side_effect=StoreUnavailable("locked")))
        page.get_by_role("combobox", name="Begin with").click()
        page.get_by_role("option", name="examples/movielens-survive.yaml").click()
        expect(editor).to_contain_text("data/movielens")
    monkeypatch.setattr(spec_text, "_EXAMPLES", tmp_path)
    page.goto("/dashboard/new")
    expect(editor).to_contain_text("my-job")


def test_code_that_is_too_large_for_a_page_is_told_of(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    page.goto("/dashboard/new")
    for num_bytes, told in ((8_000_000, "1 file uploaded"), (9_000_000, "at most 8 MB")):
        file.write_bytes(b"#" * num_bytes)
        with page.expect_file_chooser() as choosing:
            page.get_by_role("button", name="Upload code").click()
        choosing.value.set_files(file)
        expect(page.get_by_text(told)).to_be_visible()


def test_the_form_of_a_new_job_says_what_is_wrong_and_leaves_the_text_alone(page: Page) -> None:
    page.goto("/dashboard/new")
    editor, workers = (page.get_by_label(name, exact=True) for name in ("Spec", "workers"))
    for device in ("cpu", "cp"):
        spec = spec_document(name=f"on-{device}", resources={"device": device})
        editor.press("ControlOrMeta+a")
        page.keyboard.insert_text(json.dumps(spec, indent=2))
        expect(page.get_by_label("name", exact=True)).to_have_value(f"on-{device}")
    expect(page.get_by_text("Input should be 'auto', 'cpu' or 'cuda'")).to_have_count(2)
    workers.fill("[")
    expect(page.get_by_text("found '<stream end>'")).to_have_count(2)
    workers.fill("6")
    expect(page.get_by_text("found '<stream end>'")).to_have_count(0)
    expect(editor).to_contain_text('"workers": 6')
    expect(editor).to_contain_text('"device": "cp"')


def test_a_field_that_cannot_be_read_lets_nothing_be_submitted_until_it_is_as_it_was(
    page: Page,
) -> None:
    page.goto("/dashboard/new")
    editor, workers = (page.get_by_label(name, exact=True) for name in ("Spec", "workers"))
    editor.press("ControlOrMeta+a")
    page.keyboard.insert_text(json.dumps(spec_document(parallelism={"workers": 6})))
    valid, submit = page.get_by_text("Valid", exact=True), page.locator(".submit-button")
    expect(valid).to_be_visible(timeout=LIVE_MS)
    workers.fill("[")
    expect(submit).to_be_disabled()
    expect(valid).to_have_count(0)
    workers.fill("6")
    expect(valid).to_be_visible(timeout=LIVE_MS)
    expect(submit).to_be_enabled()
    expect(page.get_by_text("found '<stream end>'")).to_have_count(0)


def test_a_field_keeps_what_was_typed_and_its_error_while_an_older_text_is_checked(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, begun = spec_text.check, list[str]()
    held = ("batch_size: 77\n", "batch_size: 99\n", "name: held\n")
    answers = {each: threading.Event() for each in held}

    def slow(text: str) -> spec_text.Checked:
        for each, answer in answers.items():
            if each in text:
                begun.append(each)
                answer.wait(scaled(60))
        return check(text)

    monkeypatch.setattr(spec_text, "check", slow)
    page.goto("/dashboard/new")
    editor, size = (page.get_by_label(name, exact=True) for name in ("Spec", "data.batch_size"))
    expect(editor).to_contain_text("batch_size:")
    size.fill("77")
    wait_for(lambda: begun, "the check of the text")
    size.fill("99")
    expect(editor).to_contain_text("batch_size: 99")
    answers["batch_size: 77\n"].set()
    page.get_by_label("name", exact=True).fill("later")
    expect(editor).to_contain_text("name: later")
    expect(size).to_have_value("99")
    page.get_by_label("workers", exact=True).fill("[")
    fault = page.locator(".form-panel").get_by_text("found '<stream end>'")
    expect(fault).to_be_visible()
    answers["batch_size: 99\n"].set()
    page.get_by_role("button", name="Switch theme").click()
    expect(page.locator("body.body--dark")).to_be_visible()
    expect(fault).to_be_visible()
    name = page.get_by_label("name", exact=True)
    name.fill("held")
    wait_for(lambda: held[2] in begun, "the check of the text")
    page.get_by_label("for the cluster").fill("8xH100-80GB")
    wait_for(lambda: begun.count(held[2]) > 1, "the check for the cluster")
    name.fill("free")
    expect(page.get_by_text("Checking ...", exact=True)).to_be_visible()
    answers[held[2]].set()
    page.get_by_role("button", name="Switch theme").click()
    expect(page.locator("body.body--dark")).not_to_be_visible()
    expect(name).to_have_value("free")


def test_a_draft_is_kept_by_its_tab_until_a_job_was_made_of_it(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    page.goto("/dashboard/new")
    editor, drafted = page.get_by_label("Spec", exact=True), json.dumps(spec_document(name="kept"))
    editor.press("ControlOrMeta+a")
    page.keyboard.insert_text(drafted)
    searched = page.get_by_label("fields to search")
    trials = page.get_by_label("trials", exact=True)
    trials.fill("7")
    searched.fill("training.epochs=1,2")
    sweep = page.get_by_role("button", name="Start the sweep")
    expect(sweep).to_be_visible(timeout=LIVE_MS)
    page.goto(f"/dashboard/new?source={running.id}")
    expect(editor).to_contain_text(running.name)
    page.goto("/dashboard/new")
    expect(editor).to_contain_text(drafted)
    expect(sweep).to_be_visible(timeout=LIVE_MS)
    expect(trials).to_have_value("7")
    page.get_by_role("combobox", name="Begin with").click()
    page.get_by_role("option", name="movielens-auto").click()
    expect(editor).not_to_contain_text(drafted)
    page.reload()
    expect(trials).to_have_value("7")
    page.goto("/dashboard/new")
    editor.press("ControlOrMeta+a")
    page.keyboard.insert_text(drafted)
    expect(trials).to_have_value("20")
    searched.fill("")
    expect(page.get_by_text("Valid", exact=True)).to_be_visible(timeout=LIVE_MS)
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="kept")).to_be_visible()
    expect(page.get_by_label("Log source")).not_to_be_visible()
    page.goto("/dashboard/new")
    expect(editor).to_contain_text("The demo")
    expect(editor).not_to_contain_text("kept")


def test_keys_that_are_typed_while_a_draft_is_checked_stay_in_their_order(page: Page) -> None:
    page.goto("/dashboard/new")
    editor, typed = page.get_by_label("Spec", exact=True), "# " + "0123456789" * 4
    editor.press("ControlOrMeta+Home")
    page.keyboard.type(typed, delay=50)  # The first check answers meanwhile.
    expect(page.locator(".problem")).to_be_visible()
    expect(editor).to_contain_text(typed)


def test_several_jobs_are_cancelled_and_deleted_together(
    page: Page, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, is_closed = Rest.send, threading.Event()

    async def held(rest: Rest, method: str, path: str, **options: Any) -> Any:
        await asyncio.to_thread(is_closed.wait, scaled(60))
        return await send(rest, method, path, **options)

    monkeypatch.setattr(Rest, "send", held)
    submit(dashboard, "first")
    submit(dashboard, "second")
    page.goto("/dashboard/")
    page.get_by_role("checkbox", name="Select first").click()
    expect(page.get_by_text("1 selected")).to_be_visible()
    page.get_by_label("Search name or id").fill("second")
    expect(page.locator(".selection")).not_to_be_visible(timeout=LIVE_MS)
    expect(page.locator(".job-row")).to_have_count(1)  # or the two below would be the old ones
    page.get_by_label("Search name or id").fill("")
    expect(page.locator(".job-row")).to_have_count(2)
    for button, asked in (("Cancel", "Cancel jobs"), ("Delete", "Delete jobs")):
        page.get_by_role("checkbox", name="Select all").click()
        page.locator(".selection").get_by_role("button", name=button).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(f"{button} 2 jobs: second, first?")
        dialog.get_by_role("button", name=asked).click()
        expect(dialog).to_have_count(0)
        if button == "Cancel":
            page.get_by_role("button", name="Switch theme").click()
            expect(page.locator("body.body--dark")).to_be_visible()  # The dialog is deleted now.
            is_closed.set()
        expect(page.get_by_text("2 jobs ").first).to_be_visible(timeout=LIVE_MS)
        if button == "Cancel":
            expect(page.locator(".job-status", has_text="cancelled")).to_have_count(2)
    expect(page.get_by_text("No jobs yet")).to_be_visible(timeout=LIVE_MS)
    expect(page.get_by_text("shardloom run examples/")).to_be_visible()
    assert dashboard.store.list_jobs(JobFilter())[0] == []


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_pages_are_accessible(
    page: Page, dashboard: Dashboard, running: Job, axe: str, theme: str
) -> None:
    store_sweep(dashboard, "train/loss", (1, running.id))
    cookie = {"name": "shardloom-theme", "value": theme, "domain": "127.0.0.1", "path": "/"}
    page.context.add_cookies([cookie])
    for path, shown in (
        ("", ".job-row"),
        ("new", ".problem"),
        (f"compare?jobs={running.id}", ".drawn"),
        (f"jobs/{running.id}", ".drawn"),
        ("sweeps", ".data"),
        ("sweeps/sweep-1", ".badge"),
        ("no/such/page", ".blank"),
        ("cluster", ".figures"),
        ("settings", ".data, .empty"),
    ):
        page.goto(f"/dashboard/{path}")
        expect(page.locator(shown).first).to_be_visible(timeout=LIVE_MS)
        assert serious_faults(page, axe) == [], path


# What jobs could call a metric before names had a pattern.
HOSTILE = 'x" innerHTML="<img src=q onerror=window.pwned=1>'


def test_no_name_of_a_metric_becomes_a_part_of_the_page(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    store_sweep(dashboard, HOSTILE, (HOSTILE, running.id))
    told = metrics(40).model_copy(update={"values": {HOSTILE: 0.5}})
    tell(dashboard.store, running, told)
    compared = f"compare?jobs={running.id}&metrics={quote(HOSTILE)}"
    for path, label in (
        ("sweeps/sweep-1", f"{HOSTILE} by trial"),
        (compared, HOSTILE),
        (f"jobs/{running.id}", "Loss"),
    ):
        page.goto(f"/dashboard/{path}")
        chart = page.get_by_role("img", name=label, exact=True)
        expect(chart).to_be_visible(timeout=LIVE_MS)
        expect(page.get_by_role("button", name=f"{label} as CSV", exact=True)).to_be_visible()
        chart.hover()
        page.wait_for_load_state("networkidle")
        assert page.locator("img[src=q]").count() == 0, path
        assert page.evaluate("window.pwned") is None, path


def test_the_job_page_shows_figures_charts_groups_timeline_and_checkpoints(
    page: Page, running: Job
) -> None:
    open_job(page, running)
    expect(page.locator(".figure", has_text="Validation RMSE")).to_contain_text("0.9100")
    titles = page.locator(".chart-panel:visible h2")
    expect(titles).to_have_text(["Loss", "RMSE", "Rows/s", "Time of a step", "Sync time"])
    expect(page.locator(".chart canvas:visible")).to_have_count(5)
    expect(page.locator(".group-grid .rank")).to_have_text(["0", "2", "1", "3"])
    expect(page.locator(".timeline")).to_contain_text("checkpoint at step 40")
    page.get_by_role("tab", name="Checkpoints").click()
    expect(page.locator(".data .badge")).to_have_text("best")
    page.get_by_role("tab", name="Attempts").click()
    expect(page.locator(".tabs-panel .data")).to_contain_text(f"{running.id}-a0")
    page.get_by_role("tab", name="Spec").click()
    expect(page.locator(".spec")).to_contain_text("embedding_tables:")


def test_of_very_many_tables_the_largest_are_listed_and_others_found(
    page: Page, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragments, "MAX_TABLES", 1)
    tables = [{"name": name, "num_embeddings": 100, "embedding_dim": 8} for name in ("a", "b")]
    features = [{"name": f"of_{name}", "type": "id", "table": name} for name in ("a", "b")]
    features.append({"name": "age", "type": "dense"})
    job = start_job(dashboard.store, "wide", embedding_tables=tables, features=features)
    plans = [table_wise_plan("a", 1), table_wise_plan("b", 0, size_bytes=9000)]
    tell(dashboard.store, job, workers_started(tables=plans))
    open_job(page, job)
    listed = page.locator(".plan .name")
    expect(listed).to_have_text(["b"])
    page.get_by_label("Search tables").fill("A")
    expect(listed).to_have_text(["a"])
    tell(dashboard.store, job, workers_started(tables=[table_wise_plan("aa", 0)]))
    expect(listed).to_have_text(["aa"], timeout=LIVE_MS)
    monkeypatch.setattr("service.dashboard.job._MAX_COLOURED_CHARS", 10)
    page.get_by_role("tab", name="Spec").click()
    expect(page.locator(".spec.long")).to_contain_text("embedding_tables:")


def test_a_trace_is_asked_for_and_then_offered_for_download(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    open_job(page, running)
    page.get_by_role("tab", name="Traces").click()
    expect(page.get_by_text("No trace has been written yet")).to_be_visible()
    page.get_by_role("button", name="Record a trace").click()
    page.get_by_label("Steps").fill("5")
    page.get_by_role("button", name="Record", exact=True).click()
    expect(page.locator(".timeline")).to_contain_text("trace of 5 step(s)", timeout=LIVE_MS)
    request = json.loads(files_of(dashboard, running).trace_request_path.read_text())
    assert (request["num_steps"], request["ranks"]) == (5, [0])
    tell(dashboard.store, running, trace_written(request["id"]))
    link = page.get_by_role("link", name=f"{request['id']}-rank0.json.gz")
    expect(link).to_be_visible(timeout=LIVE_MS)
    wanted = f"/v1/jobs/{running.id}/traces/{request['id']}-rank0.json.gz?attempt={running.id}-a0"
    expect(link).to_have_attribute("href", wanted)


def test_progress_and_charts_follow_the_store_without_a_reload(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    open_job(page, running)
    loss_chart = page.locator(".chart").first
    before = settled_picture(loss_chart)
    traffic = page.locator(".chart-panel", has_text="Sync traffic")
    expect(traffic).not_to_be_visible()
    told = metrics(60, train_loss=0.5, sync_bytes=2e6, sync_density=0.1)
    tell(dashboard.store, running, told, progress(60))
    expect(page.locator(".progress-panel")).to_contain_text("step 60 of 100", timeout=LIVE_MS)
    expect(page.locator(".figure", has_text="Train loss")).to_contain_text("0.5000")
    drawn = settled_picture(loss_chart)
    assert drawn != before
    expect(traffic.locator("canvas")).to_be_visible(timeout=LIVE_MS)
    assert traffic.locator("canvas").bounding_box()["width"] > 200, "as wide as the others"
    loss_chart.hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    zoomed = settled_picture(loss_chart)
    log_scale, zoom = (page.get_by_role("checkbox", name=each) for each in ("Log scale", "Zoom"))
    log_scale.click()
    assert len({drawn, zoomed, settled_picture(loss_chart)}) == 3
    for box in (log_scale, zoom, zoom):
        box.click()
    wait_for(lambda: loss_chart.screenshot() == drawn, "the whole chart")


def test_the_page_of_a_job_says_when_it_cannot_be_read_and_that_it_was_deleted(
    page: Page,
    dashboard: Dashboard,
    running: Job,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = replace(dashboard.store.get_job(running.id), status=JobStatus.FAILED, message="broke")
    dashboard.store.update_job(ended)
    with monkeypatch.context() as away:
        locked = Mock(side_effect=StoreUnavailable("locked"))
        away.setattr(dashboard.store, "metric_names", locked)
        open_job(page, running)
        expect(page.locator(".heading .status")).to_have_text("failed")
        expect(page.get_by_text("What is shown is old")).to_be_visible(timeout=LIVE_MS)
    chart = page.locator(".chart-panel.drawn").first
    expect(chart).to_be_visible(timeout=LIVE_MS)
    settled_picture(chart)
    with monkeypatch.context() as away:
        points, sample = (Mock(side_effect=StoreUnavailable("locked")) for _ in range(2))
        away.setattr(dashboard.store, "metric_points", points)
        away.setattr(dashboard.store, "metric_sample", sample)
        chart.get_by_role("button", name="CSV").click()
        expect(page.get_by_text("The points cannot be read: locked")).to_be_visible()
        chart.locator(".chart").hover()
        page.keyboard.down("Control")
        page.mouse.wheel(0, -300)
        page.keyboard.up("Control")
        wait_for(lambda: points.call_count > 1, "a zoom to read points")
        page.goto("/dashboard/")
        wait_for(lambda: sample.called, "the list to read curves")
        expect(page.get_by_role("row").filter(has_text=running.id)).to_be_visible()
    open_job(page, running)
    with monkeypatch.context() as away:
        away.setattr(dashboard.store, "get_job", locked)
        expect(page.get_by_text("What is shown is old")).to_be_visible(timeout=LIVE_MS)
    expect(page.get_by_text("What is shown is old")).not_to_be_visible(timeout=LIVE_MS)
    dashboard.store.delete_job(running.id)
    expect(page.get_by_text("This job was deleted")).to_be_visible(timeout=LIVE_MS)
    expect(page.get_by_role("link", name="New from this")).not_to_be_visible()
    page.get_by_role("tab", name="Spec").click()
    expect(page.locator(".spec")).to_contain_text(running.name)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_log_tail_shows_rank_0_and_then_follows_the_chosen_source(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    open_job(page, running)
    log = page.locator(".log-lines")
    expect(log).to_contain_text("step 40 loss", timeout=LIVE_MS)
    page.get_by_role("combobox", name="Log source").click()
    page.get_by_role("option", name="driver").click()
    expect(log).to_contain_text("driver is up", timeout=LIVE_MS)
    expect(log).not_to_contain_text("step 40 loss")
    with files_of(dashboard, running).log_path("driver").open("a") as file:
        file.write("workers were lost\n")
    expect(log).to_contain_text("workers were lost", timeout=LIVE_MS)


def test_a_job_is_paused_by_a_button_and_stopped_by_another_which_asks_first(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    open_job(page, running)
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("button", name="Keep it").click()
    expect(page.get_by_role("dialog")).not_to_be_visible()
    assert not dashboard.store.get_job(running.id).cancel_requested
    assert not dashboard.woken.is_set()
    expect(page.get_by_role("button", name="Resume")).not_to_be_visible()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Pausing")).to_be_disabled(timeout=LIVE_MS)
    assert dashboard.store.get_job(running.id).pause_requested
    assert dashboard.woken.is_set()
    dashboard.woken.clear()
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    expect(page.locator(".heading .status")).to_have_text("stopping", timeout=LIVE_MS)
    assert dashboard.store.get_job(running.id).cancel_requested
    assert dashboard.woken.is_set()


def test_what_does_not_exist_is_a_friendly_404(page: Page, running: Job) -> None:
    sources = ("new?source=.", f"new?source={running.id}/logs")
    for path in ("jobs/job-unknown", "no/such/page", "sweeps/%3F", *sources):
        answer = page.goto(f"/dashboard/{path}")
        assert answer.status == 404, path
        expect(page.get_by_text("GET /v1")).to_have_count(0)
        page.get_by_role("link", name="See all jobs").click()
        expect(page.get_by_role("heading", name="Jobs")).to_be_visible()


def test_a_phone_needs_no_sideways_scrolling(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto("/dashboard/")
    expect(page.get_by_role("link", name=running.name)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    open_job(page, running)
    expect(page.locator(".chart canvas:visible")).to_have_count(5)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    open_job(page, start_job(dashboard.store, "n" * 63))
    assert page.evaluate("document.documentElement.scrollWidth") == 400


@pytest.mark.slow
def test_a_page_whose_storage_hangs_says_so_follows_the_job_and_shows_logs_once_it_answers(
    page: Page, dashboard: Dashboard, running: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hanging(files: AttemptDir) -> list[str]:
        answers.wait(scaled(60))
        return list_sources(files)

    def soon(path: Path, call: Callable[[], object], deadline_s: float, owner: str) -> object:
        return in_time(path, call, 0.1, owner)

    monkeypatch.setattr(panels, "list_sources", hanging)
    monkeypatch.setattr(run_storage, "in_time", soon)
    open_job(page, running)
    fault = page.get_by_text("Logs and exports cannot be read")
    expect(fault).to_contain_text("storage has not answered", timeout=LIVE_MS)
    expect(fault).to_contain_text("storage hangs", timeout=2 * LIVE_MS)
    assert [*storage.hanging().values()] == [storage.MAX_OF_ONE]
    tell(dashboard.store, running, progress(70))
    expect(page.get_by_text("step 70 of 100")).to_be_visible(timeout=LIVE_MS)
    answers.set()
    expect(page.locator(".log-lines")).to_contain_text("step 40 loss", timeout=LIVE_MS)
    expect(fault).not_to_be_visible(timeout=LIVE_MS)


@pytest.mark.slow
def test_an_export_is_asked_for_and_offered_for_download_when_it_is_done(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    open_job(page, running)
    page.get_by_role("tab", name="Checkpoints").click()
    expect(page.get_by_text("Nothing has been exported yet")).to_be_visible()
    page.get_by_role("button", name="Export", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Export").click()
    row = page.get_by_role("row", name="queued")
    expect(row).to_be_visible(timeout=LIVE_MS)
    (folder,) = list_exports(RunDir(dashboard.runs_dir / running.id))
    assert (folder.wanted.checkpoint, folder.wanted.quantize) == ("newest", "int8")
    folder.artifact.mkdir()
    facts = {"job": "x", "checkpoint": "step-40", "step": 40, "quantize": "int8", "versions": {}}
    write_manifest(folder.artifact, **facts)
    link = page.get_by_role("link", name=folder.id)
    expect(link).to_have_attribute(
        "href", f"/v1/jobs/{running.id}/exports/{folder.id}/archive", timeout=LIVE_MS
    )
    page.get_by_role("button", name="Delete an export").click()
    page.get_by_role("combobox", name="Export").click()
    page.get_by_role("option", name=folder.id).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("Nothing has been exported yet")).to_be_visible(timeout=LIVE_MS)
    assert not folder.root.exists()


@pytest.mark.slow
def test_a_job_that_ended_goes_on_from_the_checkpoint_that_was_chosen(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    tell(dashboard.store, running, checkpoint(50))
    ended = replace(dashboard.store.get_job(running.id), status=JobStatus.FAILED, message="broke")
    dashboard.store.update_job(ended)
    open_job(page, running)
    expect(page.get_by_role("button", name="Cancel job")).not_to_be_visible()
    page.get_by_role("button", name="Go on from checkpoint").click()
    page.get_by_role("combobox", name="Checkpoint").click()
    page.get_by_role("option", name="step 40, best so far").click()
    page.get_by_role("dialog").get_by_role("button", name="Go on").click()
    expect(page.locator(".heading .status")).to_have_text("queued", timeout=LIVE_MS)
    resumed_from = dashboard.store.get_job(running.id).resume_from
    assert resumed_from and resumed_from.endswith("step-00000040")
