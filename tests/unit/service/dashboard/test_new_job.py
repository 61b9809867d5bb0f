"""The form of a new job, whose fields are read as they are typed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from service.dashboard.new_job import NewJobPage


def test_a_field_that_cannot_be_read_keeps_its_error_although_a_check_of_the_text_was_due() -> None:
    def check(*, with_current_invocation: bool) -> None:
        assert with_current_invocation, "a check may wait for its result already"
        field.error = None

    field, path = SimpleNamespace(value="[", error=None), "parallelism.workers"
    page: Any = SimpleNamespace(
        _is_syncing=False,
        _inputs={path: field},
        _editor=SimpleNamespace(value="name: night\n"),
        _pending=Mock(cancel=Mock(side_effect=check)),
    )
    NewJobPage._field_changed(page, path)
    assert page._pending.cancel.call_count == 1
    assert "stream end" in str(field.error)
