"""Groups that come and go in a real browser, and the buttons that move them."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.conftest import Dashboard
from tests.e2e.scenes import ElasticJob
from tests.harness.builders import HOSTS
from tests.harness.wait import scaled
from trainer.protocol.run_dir import RunDir

LIVE_MS = scaled(8_000)


@pytest.fixture
def elastic(dashboard: Dashboard) -> ElasticJob:
    """Three groups that have trained for a while."""
    scene = ElasticJob.start(dashboard.store)
    scene.train(10, 120, 15, 60)
    scene.save(100, 50)
    return scene


def open_job(page: Page, scene: ElasticJob) -> None:
    """Open the job's page and wait until it is drawn."""
    page.goto(f"/dashboard/jobs/{scene.job.id}")
    expect(page.get_by_role("heading", name=scene.job.name)).to_be_visible()


def wanted_of(dashboard: Dashboard, scene: ElasticJob) -> dict[str, object]:
    """What the driver is asked for."""
    attempt = RunDir(dashboard.runs_dir / scene.job.id).attempt(f"{scene.job.id}-a0")
    found: dict[str, object] = json.loads(attempt.resize_request_path.read_text())
    return found


def test_a_loss_and_the_recovery_are_followed_without_a_reload(
    page: Page, elastic: ElasticJob
) -> None:
    open_job(page, elastic)
    section, grid = page.locator(".membership-panel"), page.locator(".members")
    expect(section).to_contain_text("3 of 3 groups")
    expect(section.locator(".lane")).to_have_count(3)
    expect(grid.locator(".rank")).to_have_text(["0", "1"] * 3)
    elastic.lose(100)
    expect(page.locator(".heading")).to_contain_text("2 of 3 groups", timeout=LIVE_MS)
    expect(section).to_contain_text("in 310 ms, nothing to redo")
    expect(section.locator(".lane i.tone-bad")).to_have_count(1)
    expect(grid.locator(".rank.missing")).to_have_count(2)
    expect(grid.locator(".copies")).to_have_text(["2 of 3", "2 of 3"])
    expect(page.locator(".timeline .tone-warn")).to_contain_text("2 groups train on")
    elastic.replace(105)
    expect(section).to_contain_text("3 of 3 groups", timeout=LIVE_MS)
    expect(page.locator(".heading")).not_to_contain_text("of 3 groups")
    expect(page.locator(".timeline")).to_contain_text("joined again: copied 105.0 MB")


@pytest.mark.slow
def test_the_list_marks_a_job_with_fewer_groups_than_it_should_have(
    page: Page, elastic: ElasticJob
) -> None:
    page.goto("/dashboard/")
    row = page.get_by_role("row").filter(has_text=elastic.job.id)
    expect(row).to_contain_text("running")
    expect(row).not_to_contain_text("groups")
    elastic.lose(100)
    expect(row).to_contain_text("2 of 3 groups", timeout=LIVE_MS)


@pytest.mark.slow
def test_goodput_is_shown_with_what_took_the_rest(page: Page, elastic: ElasticJob) -> None:
    open_job(page, elastic)
    goodput = page.locator(".goodput")
    expect(goodput).to_contain_text("96.8% goodput")
    expect(goodput.locator(".losses i")).to_have_count(4)
    expect(goodput.locator(".loss-key")).to_contain_text("work done again")
    expect(page.locator(".membership-facts")).to_contain_text("10 steps")


@pytest.mark.slow
def test_a_size_is_chosen_from_those_that_fit(
    page: Page, dashboard: Dashboard, elastic: ElasticJob
) -> None:
    open_job(page, elastic)
    page.get_by_role("button", name="Resize").click()
    page.get_by_role("combobox", name="Workers").click()
    expect(page.get_by_role("option")).to_have_text(["4", "6", "8"])
    page.get_by_role("option", name="8").click()
    page.get_by_role("dialog").get_by_role("button", name="Resize").click()
    expect(page.locator(".timeline")).to_contain_text("resize to 8 workers", timeout=LIVE_MS)
    expect(page.locator(".membership-facts")).to_contain_text("8 workers")
    assert wanted_of(dashboard, elastic)["workers"] == 8


@pytest.mark.slow
def test_a_host_is_drained_and_taken_back(
    page: Page, dashboard: Dashboard, elastic: ElasticJob
) -> None:
    open_job(page, elastic)
    wishes: list[tuple[str, list[str]]] = [("drain of host", [HOSTS[1]]), ("used again", [])]
    for told, wanted in wishes:
        page.get_by_role("button", name="Drain hosts").click()
        page.get_by_role("combobox", name="Hosts to leave").click()
        page.get_by_role("option", name=HOSTS[1]).click()
        page.get_by_text("Drain hosts").last.click()
        page.get_by_role("dialog").get_by_role("button", name="Apply").click()
        expect(page.locator(".timeline")).to_contain_text(told, timeout=LIVE_MS)
        assert wanted_of(dashboard, elastic)["drain_hosts"] == wanted


@pytest.mark.slow
def test_groups_need_no_sideways_scrolling_on_a_phone(page: Page, elastic: ElasticJob) -> None:
    elastic.lose(100)
    page.set_viewport_size({"width": 400, "height": 800})
    open_job(page, elastic)
    expect(page.locator(".lane")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
