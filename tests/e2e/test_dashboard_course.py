"""The buttons of a job's page that change its course, in a real browser over a real store."""

from __future__ import annotations

from dataclasses import replace

from playwright.sync_api import Page, expect

from service.domain import Job, JobStatus
from tests.e2e.conftest import Dashboard
from tests.e2e.test_dashboard import LIVE_MS, open_job, report, running, submit
from tests.unit.service.builders import checkpoint

__all__ = ["running"]


def test_a_running_job_is_paused_by_a_button(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    open_job(page, running)
    expect(page.get_by_role("button", name="Resume")).not_to_be_visible()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Pausing")).to_be_disabled(timeout=LIVE_MS)
    asked = dashboard.store.get_job(running.id)
    assert asked.pause_requested
    assert dashboard.woken.is_set()


def test_a_job_that_waits_pauses_at_once_and_goes_back_to_its_place(
    page: Page, dashboard: Dashboard
) -> None:
    job = submit(dashboard, "patient")
    open_job(page, job)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".heading .status")).to_have_text("paused", timeout=LIVE_MS)
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".heading .status")).to_have_text("queued", timeout=LIVE_MS)
    assert dashboard.store.get_job(job.id).queued_at == job.queued_at


def test_a_job_that_ended_goes_on_from_the_checkpoint_that_was_chosen(
    page: Page, dashboard: Dashboard, running: Job
) -> None:
    report(dashboard, running, checkpoint(50))
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
