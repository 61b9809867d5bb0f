"""Signing in with a browser, and pages under the content security policy of the whole service."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from service.backends.fake import Script
from service.domain.auth import AuditFilter, login_code
from service.domain.job_filter import JobFilter
from tests.e2e.conftest import LIVE_MS, open_tab, serious_faults, serve, tell
from tests.harness.builders import metrics, progress, queued_job, spec_document, workers_started
from tests.harness.databases import SqliteTemplate, store_job
from tests.harness.service import Guarded, guarded
from tests.harness.wait import wait_for
from trainer.layout.hosts import HostFacts


@pytest.fixture
def auth() -> str:
    return "required"


@pytest.fixture
def house(tmp_path: Path, auth: str, sqlite_template: SqliteTemplate) -> Iterator[Guarded]:
    sqlite_template.copy(f"sqlite:///{tmp_path / 'shardloom.db'}")
    house = guarded(tmp_path, auth=auth, dashboard=True)
    store_job(house.store, queued_job(name="movie-nights"))
    yield house
    house.store.close()


@pytest.fixture
def tab(browser: Browser, house: Guarded) -> Iterator[Page]:
    """A tab that fails the test for whatever the policy forbids, and any other fault."""
    with serve(house.http.app) as url, open_tab(browser, url) as (page, faults):
        yield page
    assert [fault for fault in faults if "401" not in fault] == []


def test_a_reader_signs_in_works_and_signs_out(tab: Page, house: Guarded, axe: str) -> None:
    tab.goto("/")
    expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
    assert serious_faults(tab, axe) == []
    tab.get_by_label("API key").fill("shl_wrong")
    tab.get_by_role("button", name="Sign in").click()
    expect(tab.get_by_role("alert")).to_contain_text("unknown, expired or revoked")
    tab.get_by_label("API key").fill(house.keys["submitter"])
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_role("link", name="movie-nights").click()
    expect(tab.locator(".job-head")).to_contain_text("movie-nights")
    tab.get_by_role("button", name="Sign out").click()
    expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
    tab.goto("/dashboard/")
    expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()


def _enter(tab: Page, house: Guarded, path: str, key: str) -> None:
    """Open a page by a key or, as the service's own user, by a link."""
    tab.goto(path)
    if house.settings.auth == "required":
        tab.get_by_label("API key").fill(house.keys[key])
        tab.get_by_role("button", name="Sign in").click()
    else:
        expect(tab.get_by_text("shardloom status")).to_be_visible()
        token = house.security.authenticator.local_token or ""
        tab.goto(f"/login?code={login_code(token, time.time())}&next={path}")


def test_a_job_is_submitted_from_the_page_and_watched_to_its_end(tab: Page, house: Guarded) -> None:
    house.backend.set_hosts(HostFacts("a", 16, 0, 4 * 2**30))
    _enter(tab, house, "/dashboard/new", "submitter")
    editor = tab.get_by_role("textbox", name="Spec")
    expect(editor).to_contain_text("The demo")
    with tab.expect_file_chooser() as chosen:
        tab.get_by_role("button", name="Upload code").click()
    chosen.value.set_files({"name": "net.py", "mimeType": "text/x-python", "buffer": b"WIDTH = 8"})
    expect(tab.get_by_text("model.code names them")).to_be_visible(timeout=LIVE_MS)
    editor.press("ControlOrMeta+a")
    tab.keyboard.insert_text(json.dumps(spec_document(name="by-hand"), indent=2))
    expect(tab.get_by_label("name", exact=True)).to_have_value("by-hand", timeout=LIVE_MS)
    workers = tab.get_by_label("workers", exact=True)
    workers.fill("3")
    expect(tab.locator(".problem").first).to_contain_text("parallelism", timeout=LIVE_MS)
    expect(tab.get_by_role("button", name="Submit")).to_be_disabled()
    workers.fill("6")
    # In the spec's layout, and as soon as others are compared in the recommended one.
    expect(tab.locator(".plan-size")).to_contain_text("6 workers = ", timeout=LIVE_MS)
    expect(editor).to_contain_text('"workers": 6')
    tab.get_by_role("button", name="Submit").click()
    heading = tab.locator(".heading")
    expect(heading).to_contain_text("by-hand", timeout=LIVE_MS)
    expect(heading).to_contain_text("starting", timeout=LIVE_MS)
    [job] = house.store.list_jobs(JobFilter(name="by-hand"))[0]
    tell(house.store, job, workers_started(), metrics(10, train_loss=0.5), progress(40))
    expect(heading).to_contain_text("running", timeout=LIVE_MS)
    expect(tab.locator(".progress-panel")).to_contain_text("step 40 of 100", timeout=LIVE_MS)
    house.backend.play(job.id, Script(("succeeded",)))
    expect(heading).to_contain_text("succeeded", timeout=LIVE_MS)
    tab.get_by_role("link", name="New from this").click()
    tab.get_by_label("training.epochs").fill("5")
    expect(editor).to_contain_text("epochs: 5", timeout=LIVE_MS)
    tab.get_by_role("button", name="Submit").click()
    # A page that is not connected yet forgets what is clicked.
    expect(tab.get_by_text(re.compile("No log has been|Logs appear"))).to_be_visible(
        timeout=LIVE_MS
    )
    tab.get_by_role("tab", name="Spec").click()
    expect(tab.locator(".differences tbody tr")).to_have_text(re.compile("training.epochs.*5"))
    tab.goto("/dashboard/new")
    editor.press("ControlOrMeta+a")
    large = [{"name": "users", "num_embeddings": 2 * 10**8, "embedding_dim": 8}]
    document = spec_document(name="too-large", embedding_tables=large)
    tab.keyboard.insert_text(json.dumps(document, indent=2))
    expect(tab.get_by_label("name", exact=True)).to_have_value("too-large", timeout=LIVE_MS)
    tab.get_by_role("button", name="Submit").click()
    expect(tab.get_by_role("dialog")).to_contain_text("What would do: raise", timeout=LIVE_MS)
    tab.get_by_role("button", name="Submit all the same").click()
    expect(heading).to_contain_text("too-large", timeout=LIVE_MS)


def test_a_sweep_is_begun_from_the_page_and_watched_to_its_best_trial(
    tab: Page, house: Guarded
) -> None:
    _enter(tab, house, "/dashboard/new", "submitter")
    tab.get_by_role("textbox", name="Spec").press("ControlOrMeta+a")
    tab.keyboard.insert_text(json.dumps(spec_document(name="tuned"), indent=2))
    searched = tab.get_by_label("fields to search")
    searched.fill("training.epochs")
    expect(tab.get_by_text("does not read KEY=RANGE")).to_be_visible(timeout=LIVE_MS)
    expect(tab.get_by_role("button", name="Submit")).to_be_disabled()
    searched.fill("training.epochs=.nan")
    # Fields below it move as the error goes: a click that begins before may end elsewhere.
    expect(tab.get_by_text("does not read KEY=RANGE")).not_to_be_visible(timeout=LIVE_MS)
    tab.get_by_role("button", name="Start the sweep").click()
    expect(tab.get_by_text("leave out binary values")).to_be_visible(timeout=LIVE_MS)
    searched.fill("training.epochs")
    expect(tab.get_by_text("does not read KEY=RANGE")).to_be_visible(timeout=LIVE_MS)
    searched.fill("training.epochs=1,2")
    # Once that is gone the page has the new ranges.
    expect(tab.get_by_text("does not read KEY=RANGE")).not_to_be_visible(timeout=LIVE_MS)
    tab.get_by_label("at a time").fill("0")
    tab.get_by_role("button", name="Start the sweep").click()
    faulty = tab.locator(".search-form .q-field--error")
    expect(faulty).to_contain_text("greater than or equal to 1", timeout=LIVE_MS)
    expect(tab.locator(".faulty-line")).to_have_count(0)
    tab.get_by_label("at a time").fill("2")
    tab.get_by_label("search", exact=True).click()
    tab.get_by_role("option", name="grid").click()
    tab.get_by_role("button", name="Start the sweep").click()
    rows = tab.locator(".compared tbody tr")
    expect(rows).to_have_count(2, timeout=LIVE_MS)
    for job in house.store.list_jobs(JobFilter(search="tuned"))[0]:
        loss = 0.5 if job.spec.training.epochs == 2 else 0.7
        wait_for(lambda job=job: house.store.get_job(job.id).current_attempt_id, "an attempt")
        tell(house.store, job, workers_started(), metrics(10, validation_rmse=loss))
        house.backend.play(job.id, Script(("succeeded",)))
    expect(tab.locator(".heading")).to_contain_text("completed", timeout=LIVE_MS)
    expect(rows.first).to_contain_text("best")
    expect(rows.first).to_contain_text("0.5000")
    chart = tab.locator(".chart-panel").first
    for kind, begins in (("CSV", b"trial,job"), ("PNG", b"\x89PNG")):
        with tab.expect_download() as download:
            chart.get_by_role("button", name=kind).click()
        assert download.value.path().read_bytes().startswith(begins)
    tab.get_by_role("link", name="New job from the best").click()
    expect(tab.get_by_role("combobox", name="Begin with")).to_have_value(
        re.compile("copy of"), timeout=LIVE_MS
    )
    expect(tab.get_by_role("textbox", name="Spec")).not_to_contain_text("labels")


def test_a_viewer_sees_everything_of_own_projects_but_actions(tab: Page, house: Guarded) -> None:
    store_job(house.store, replace(queued_job(name="of-others"), project="ads"))
    _enter(tab, house, "/dashboard/", "viewer")
    expect(tab.get_by_role("checkbox", name=re.compile("Select (movie|of)"))).to_have_count(1)
    tab.goto("/dashboard/?project=ads")
    expect(tab.get_by_text("No job matches")).to_be_visible()
    tab.goto("/dashboard/")
    tab.get_by_role("checkbox", name="Select movie-nights").click()
    actions = tab.locator(".selection").get_by_role("button")
    expect(actions).to_have_text(["Compare", "Clear"])
    expect(tab.get_by_role("link", name="New job")).not_to_be_visible()
    tab.get_by_role("link", name="movie-nights").click()
    expect(tab.locator(".job-head")).to_contain_text("movie-nights")
    for name in ("Cancel job", "Pause", "New from this", "Record a trace", "Export"):
        expect(tab.get_by_text(name, exact=True)).not_to_be_visible()
    tab.goto("/dashboard/cluster")
    expect(tab.locator(".policy")).to_contain_text("migration")
    tab.goto("/dashboard/settings")
    expect(tab.get_by_text("Projects and quotas")).to_be_visible()
    expect(tab.get_by_text("Audit log")).not_to_be_visible()


def test_quotas_are_set_of_the_project_that_is_named_and_of_no_other(
    tab: Page, house: Guarded
) -> None:
    _enter(tab, house, "/dashboard/settings", "root")
    tab.get_by_role("button", name="Set quotas").click()
    dialog = tab.get_by_role("dialog")
    dialog.get_by_label("Project").fill("ads#2")
    dialog.get_by_label("Most workers").fill("8")
    dialog.get_by_role("button", name="Set", exact=True).click()
    expect(tab.get_by_role("alert")).to_contain_text("name")
    expect(tab.get_by_role("cell", name="ads", exact=True)).not_to_be_visible()
    # What was refused can be corrected.
    expect(dialog.get_by_label("Most workers")).to_have_value("8")
    dialog.get_by_label("Project").fill("ads")
    workers, jobs = (dialog.get_by_label(f"Most {each}") for each in ("workers", "running jobs"))
    for number, told in (("-5", "max_running_jobs: Input should be greater"), ("1e400", "unable")):
        jobs.fill(number)
        jobs.press("Enter")
        expect(tab.get_by_role("alert").filter(has_text=told)).to_be_visible()
        expect(jobs).to_have_value(number)
    jobs.fill("")
    workers.press("Enter")
    expect(dialog).not_to_be_visible()
    expect(tab.get_by_role("cell", name="ads", exact=True)).to_be_visible()
    expect(tab.get_by_role("cell", name="0 of 8", exact=True)).to_be_visible()


def test_two_quick_clicks_make_one_key_and_fields_above_the_log_stay_while_one_types(
    tab: Page, house: Guarded
) -> None:
    _enter(tab, house, "/dashboard/settings", "root")
    tab.get_by_role("button", name="Make a key").click()
    tab.get_by_role("dialog").get_by_label("Name").fill("ci")
    tab.get_by_role("button", name="Make", exact=True).dblclick()
    tab.get_by_role("button", name="I have it").click()
    expect(tab.get_by_role("cell", name="ci", exact=True)).to_have_count(1)
    expect(tab.get_by_role("dialog")).to_have_count(0)
    tab.get_by_role("button", name="Revoke ci").click()
    expect(tab.get_by_role("dialog")).to_contain_text("Revoke the key ci?")
    expect(tab.get_by_role("cell", name="revoked")).to_have_count(0)
    tab.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(tab.get_by_role("cell", name="revoked")).to_have_count(1)
    expect(tab.get_by_role("dialog")).to_have_count(0)
    actor, refused = tab.get_by_label("Actor"), tab.get_by_role("checkbox", name="Only refused")
    for is_checked in (True, False):
        refused.click()
        expect(refused).to_be_checked(checked=is_checked)  # by the service, before another click
    expect(tab.get_by_role("columnheader", name="Action", exact=True)).to_have_count(1)
    actor.press_sequentially("key:nob")
    expect(tab.get_by_text("Nothing was changed yet")).to_be_visible(timeout=LIVE_MS)
    tab.keyboard.type("ody")
    expect(actor).to_have_value("key:nobody")


def test_the_api_documents_itself_under_the_policy(tab: Page, house: Guarded) -> None:
    _enter(tab, house, "/docs", "viewer")
    tab.get_by_role("button", name="GET /healthz Whether").click()
    tab.get_by_role("button", name="Try it out").click()
    tab.get_by_role("button", name="Execute").click()
    expect(tab.locator(".live-responses-table")).to_contain_text('"status": "ok"')


@pytest.mark.parametrize("auth", ["local"])
def test_a_link_lets_the_service_s_own_user_in(tab: Page, house: Guarded) -> None:
    _enter(tab, house, "/dashboard/", "submitter")
    expect(tab.get_by_role("link", name="movie-nights")).to_be_visible()
    # Only an open websocket brings this.
    store_job(house.store, queued_job(name="later"))
    expect(tab.get_by_role("link", name="later")).to_be_visible(timeout=LIVE_MS)
    tab.get_by_role("link", name="later").click()
    tab.get_by_role("button", name="Cancel job").first.click()
    tab.locator(".dialog").get_by_role("button", name="Cancel job").click()
    expect(tab.locator(".job-head")).to_contain_text("cancelled", timeout=LIVE_MS)
    house.security.audit.flush()
    [line] = house.security.keys.list_audit(AuditFilter(action="POST /v1/jobs/{job}:cancel"))
    assert line.actor == "local"
