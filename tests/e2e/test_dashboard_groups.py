"""Groups that come and go in a real browser, and the buttons that move them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from playwright.sync_api import Page, expect

from service.db.jobs import JobStore
from service.domain.models import Job
from tests.e2e.conftest import LIVE_MS, Dashboard, files_of, open_job, start_job, tell
from tests.harness.builders import (
    ELASTIC,
    HOSTS,
    group_joined,
    group_lost,
    group_member,
    layout_chosen,
    membership_changed,
    recovered,
    workers_started,
)
from trainer.protocol.events import AttemptStarted, Event, Metrics

GOODPUT = {
    "goodput/share": 0.968,
    "goodput/lost_s/start": 33.0,
    "goodput/lost_s/recovery": 8.4,
    "goodput/lost_s/redo": 1.2,
    "goodput/lost_s/checkpoint": 0.4,
}


@dataclass
class ElasticJob:
    """A job of three groups on three hosts; times are seconds after its submission."""

    store: JobStore
    job: Job

    def tell(self, *records: Event) -> None:
        """Send records as the attempt's coordinator would."""
        tell(self.store, self.job, *records, stream="coordinator-0")

    def lose(self, at_s: float) -> None:
        """Lose the host of group 1; the others recover within a third of a second."""
        at = self.job.created_at + at_s
        self.tell(
            group_lost(1, time=at),
            membership_changed(
                group_member(0), group_member(2), time=at + 0.05, generation=4, commit=128
            ),
            recovered(time=at + 0.31, commit=129),
        )

    def replace(self, at_s: float, copied_s: float = 9.0) -> None:
        """Let another life of group 1 copy from a peer, then train."""
        at = self.job.created_at + at_s
        for standing, when, generation in (("listening", at, 5), ("current", at + copied_s, 6)):
            back = group_member(1, standing, incarnation=1)
            back = back.model_copy(update={"donor": 2 if standing == "listening" else None})
            members = [group_member(0), back, group_member(2)]
            self.tell(membership_changed(*members, time=when, generation=generation, commit=140))
        self.tell(group_joined(1, time=at + copied_s, duration_s=copied_s, donor=2))


@pytest.fixture
def elastic(dashboard: Dashboard) -> ElasticJob:
    """Three groups that have trained for a while."""
    job = start_job(dashboard.store, "movielens-elastic", age_s=120.0, parallelism=ELASTIC)
    scene, began = ElasticJob(dashboard.store, job), job.created_at
    scene.tell(
        AttemptStarted(time=began + 2, world_size=6),
        layout_chosen(time=began + 3),
        membership_changed(group_member(0), time=began + 13),
        membership_changed(group_member(0), group_member(1), time=began + 13.5, generation=2),
        membership_changed(time=began + 14, generation=3),
        workers_started(total_steps=1000).model_copy(update={"time": began + 14}),
        Metrics(time=began + 50, step=100, values=GOODPUT),
    )
    return scene


def wanted_of(dashboard: Dashboard, job: Job) -> dict[str, object]:
    """What the driver is asked for."""
    return json.loads(files_of(dashboard, job).resize_request_path.read_text())


def test_a_loss_and_the_recovery_are_followed_without_a_reload(
    page: Page, elastic: ElasticJob
) -> None:
    open_job(page, elastic.job)
    section, grid = page.locator(".membership-panel"), page.locator(".members")
    expect(section).to_contain_text("3 of 3 groups")
    expect(section.locator(".lane")).to_have_count(3)
    expect(grid.locator(".rank")).to_have_text(["0", "1"] * 3)
    elastic.lose(100)
    expect(page.locator(".heading")).to_contain_text("2 of 3 groups", timeout=LIVE_MS)
    expect(section).to_contain_text("commit 310 ms late, nothing to redo")
    expect(section.locator(".lane i.tone-bad")).to_have_count(1)
    expect(grid.locator(".rank.missing")).to_have_count(2)
    expect(grid.locator(".copies")).to_have_text(["2 of 3", "2 of 3"])
    expect(page.locator(".timeline .tone-warn")).to_contain_text("2 groups train on")
    elastic.replace(105)
    expect(section).to_contain_text("3 of 3 groups", timeout=LIVE_MS)
    expect(page.locator(".heading")).not_to_contain_text("of 3 groups")
    expect(page.locator(".timeline")).to_contain_text("joined again: copied 105.0 MB")
    moment = page.get_by_role("slider", name="Moment in the life of the job")
    moment.focus()
    for shown in ("", "", "trains, serves 1", "", "gone"):
        moment.press("ArrowLeft")
        if shown:
            expect(grid.locator(".standing", has_text=shown)).to_have_count(1)
    expect(page.locator(".moment-told")).to_contain_text("group 1 (")
    moment.press("End")
    expect(grid.locator(".standing")).to_have_text(["trains"] * 3)
    page.set_viewport_size({"width": 400, "height": 800})  # a phone's
    open_job(page, elastic.job)
    expect(section.locator(".lane")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth") == 400


@pytest.mark.slow
def test_a_size_is_chosen_from_those_that_fit_and_a_host_is_drained_and_taken_back(
    page: Page, dashboard: Dashboard, elastic: ElasticJob
) -> None:
    open_job(page, elastic.job)
    page.get_by_role("button", name="Resize").click()
    page.get_by_role("combobox", name="Workers").click()
    expect(page.get_by_role("option")).to_have_text(["4", "6", "8"])
    page.get_by_role("option", name="8").click()
    page.get_by_role("dialog").get_by_role("button", name="Resize").click()
    expect(page.locator(".timeline")).to_contain_text("resize to 8 workers", timeout=LIVE_MS)
    expect(page.locator(".membership-facts")).to_contain_text("8 workers")
    assert wanted_of(dashboard, elastic.job)["workers"] == 8
    requests: list[tuple[str, list[str]]] = [("drain of host", [HOSTS[1]]), ("used again", [])]
    for told, wanted in requests:
        page.get_by_role("button", name="Drain hosts").click()
        page.get_by_role("combobox", name="Hosts to leave").click()
        page.get_by_role("option", name=HOSTS[1]).click()
        page.get_by_text("Drain hosts").last.click()
        page.get_by_role("dialog").get_by_role("button", name="Apply").click()
        expect(page.locator(".timeline")).to_contain_text(told, timeout=LIVE_MS)
        assert wanted_of(dashboard, elastic.job)["drain_hosts"] == wanted
    page.get_by_role("button", name="Drain hosts").click()
    asked = f"{dashboard.url}/v1/jobs/{elastic.job.id}/drain"
    assert page.request.post(asked, data={"host": HOSTS[2]}).ok, "by somebody else meanwhile"
    facts = page.locator(".membership-facts")
    expect(facts).to_contain_text(f"without {HOSTS[2]}", timeout=LIVE_MS)
    page.get_by_role("combobox", name="Hosts to leave").click()
    page.get_by_role("option", name=HOSTS[1]).click()
    page.get_by_text("Drain hosts").last.click()
    page.get_by_role("dialog").get_by_role("button", name="Apply").click()
    expect(facts).to_contain_text(f"without {HOSTS[1]}", timeout=LIVE_MS)
    assert wanted_of(dashboard, elastic.job)["drain_hosts"] == [HOSTS[1], HOSTS[2]]
