"""The pure part of the 2D benchmark: its rows, what they train and how they are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks import two_d
from tests.benchmarks.report import SKIPPED, BenchmarkReport, Run, main
from tests.benchmarks.two_d import (
    best_of,
    is_comparable,
    label_of,
    layouts,
    schedule_of,
    table_rows,
)
from tests.benchmarks.two_d_train import RankResult, Schedule, peak_memory_bytes, summary
from tests.benchmarks.two_d_workload import (
    BATCH_SIZE,
    FEATURES,
    TABLE_ROWS,
    ZIPF_EXPONENT,
    TwoDLayout,
    make_batches,
    spec_of,
    zipf_ids,
)

SIDES = [*two_d.VARIANTS, *layouts()]
RESULT = RankResult(
    window_s=(1.0, 2.0, 4.0), sync_s=0.5, link_bytes=1000, peak_bytes=7, lookup_imbalance=1.25
)
SCHEDULE = Schedule(warmup_steps=1, num_windows=3, steps_per_window=10)


def test_the_table_has_every_layout_that_the_paper_compares():
    asked = product((2, 4), ("intra_host", "inter_host"), ("full", "touched_rows"), (1, 16))
    assert {TwoDLayout(*each) for each in asked} <= set(layouts())


def test_no_two_rows_share_a_name():
    assert len({label_of(side) for side in SIDES}) == len(SIDES)


@pytest.mark.parametrize("layout", layouts(), ids=label_of)
def test_a_layout_becomes_the_job_that_its_name_says(layout):
    parallelism = spec_of(two_d.WORLD_SIZE, layout).parallelism
    assert parallelism.num_replicas == layout.num_replicas
    assert parallelism.placement == layout.placement
    if layout.mode == "none":
        assert parallelism.sync.every_steps > schedule_of(layout).num_steps
    else:
        assert parallelism.sync.mode == layout.mode
        assert parallelism.sync.every_steps == layout.every_steps
    assert parallelism.sync.overlap == layout.overlap
    assert parallelism.dense == layout.dense
    assert parallelism.sync.dtype == parallelism.all_to_all.forward == layout.wire


@pytest.mark.parametrize("side", SIDES, ids=label_of)
def test_every_window_holds_whole_sync_intervals(side):
    every_steps = side.every_steps if isinstance(side, TwoDLayout) else 1
    assert schedule_of(side).steps_per_window % every_steps == 0


def test_a_rank_reads_the_same_batches_in_every_layout_and_others_read_others():
    first, again, other = (make_batches(rank, 2) for rank in (0, 0, 1))
    for ours, peers in zip(first, again, strict=True):
        assert torch.equal(ours.sparse.values(), peers.sparse.values())
        assert torch.equal(ours.dense, peers.dense)
        assert torch.equal(ours.label, peers.label)
    assert not torch.equal(first[0].sparse.values(), other[0].sparse.values())
    assert not torch.equal(first[0].sparse.values(), first[1].sparse.values())


def test_a_batch_has_one_id_a_row_and_feature():
    (batch,) = make_batches(3, 1)
    assert batch.num_rows == BATCH_SIZE
    assert batch.sparse.keys() == list(FEATURES)
    assert batch.sparse.lengths().unique().tolist() == [1]
    assert batch.sparse.values().min() >= 0
    assert batch.sparse.values().max() < TABLE_ROWS


def test_ids_follow_zipfs_law_and_frequent_ones_differ_by_table():
    counts = [
        np.bincount(zipf_ids(table, np.random.default_rng(0), (200_000,)), minlength=TABLE_ROWS)
        for table in (0, 1)
    ]
    assert counts[0].argmax() != counts[1].argmax()
    ordered = np.sort(counts[0])[::-1]
    assert ordered[0] / ordered[9] == pytest.approx(10**ZIPF_EXPONENT, rel=0.1)


def test_a_row_takes_the_slowest_rank_the_middle_window_and_the_fullest_memory():
    slow = replace(RESULT, window_s=(2.0, 1.0, 5.0), sync_s=0.75, link_bytes=10, peak_bytes=9)
    row = summary([RESULT, slow], SCHEDULE, rows_per_step=100)
    assert row["samples_per_s"] == pytest.approx(1000 / 2.0)
    assert row["samples_per_s_min"] == pytest.approx(1000 / 5.0)
    assert row["samples_per_s_max"] == pytest.approx(1000 / 2.0)
    assert row["peak_bytes"] == 9
    assert row["link_bytes_per_step"] == pytest.approx(1000 / 30)
    assert row["sync_s_per_step"] == pytest.approx(0.75 / 30)


@given(st.lists(st.floats(1, 1e6), min_size=len(SIDES), max_size=len(SIDES)))
def test_the_best_side_is_the_fastest_of_those_that_do_the_same_arithmetic(speeds):
    measured = {side: {"samples_per_s": speed} for side, speed in zip(SIDES, speeds, strict=True)}
    best = best_of(measured)
    assert is_comparable(best)
    assert measured[best]["samples_per_s"] == max(
        values["samples_per_s"] for side, values in measured.items() if is_comparable(side)
    )


def test_sides_that_round_or_average_less_are_shown_but_not_compared():
    apart = {label_of(side) for side in SIDES if not is_comparable(side)}
    common = "2D M=2 inter_host, touched_rows N=16, overlap"
    assert apart == {
        "1D fp16_wire",
        f"{common}, dense at_sync",
        f"{common}, fp16 on the wire",
        "2D M=2 inter_host, no sync",
        "2D M=4 inter_host, no sync",
    }


def test_speeds_in_the_table_are_relative_to_the_best_1d():
    values = summary([RESULT], SCHEDULE, rows_per_step=100)
    ours = layouts()[0]
    measured = {"table_wise": values, ours: values | {"samples_per_s": 875.0}}
    rows = table_rows(measured, base="table_wise")
    assert [row["configuration"] for row in rows] == ["1D table_wise", ours.label]
    assert [row["of 1D"] for row in rows] == [1.0, 1.75]


def test_a_report_holds_and_prints_its_table_beside_the_ratios(monkeypatch, tmp_path, capsys):
    values = summary([RESULT], SCHEDULE, rows_per_step=100)
    runs = [Run(0, "ours", values), Run(0, "peer", values)]
    rows = table_rows({"table_wise": values}, base="table_wise")
    report = BenchmarkReport("two_d", {}, [two_d.GOAL], runs, rows)
    path = tmp_path / "two_d.json"
    monkeypatch.setattr("sys.argv", ["two_d", "--json", str(path)])
    assert main(lambda num_pairs: report, default_pairs=1, description="") == 0
    assert json.loads(path.read_text())["rows"] == rows
    assert "1D table_wise" in capsys.readouterr().out


def test_where_hosts_cannot_be_emulated_it_skips_with_the_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(two_d, "missing_requirement", lambda: "emulated hosts need root")
    path = tmp_path / "two_d.json"
    monkeypatch.setattr("sys.argv", ["two_d", "--json", str(path)])
    assert main(two_d.run, default_pairs=1, description="") == SKIPPED
    assert "emulated hosts need root" in capsys.readouterr().err
    assert not path.exists()


def test_the_peak_memory_of_a_process_is_no_less_than_what_it_once_held():
    before = peak_memory_bytes()
    torch.ones(40_000_000).sum()
    assert peak_memory_bytes() > before or before > 160_000_000
