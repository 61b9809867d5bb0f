"""The pure part of the NE parity benchmark: its rows, its gaps, its command line."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.criteo_teacher import (
    NUM_CATEGORICAL,
    NUM_DENSE,
    CriteoFormatError,
    Teacher,
    read_criteo,
    table_sizes,
)
from tests.benchmarks.ne_parity import document_of, name_of_scale, parse, variants_of
from tests.benchmarks.ne_parity_case import Settings, batches, rows_of_rank
from tests.benchmarks.ne_parity_ranks import Curve, SeedResult, spec_of
from tests.benchmarks.ne_parity_report import PARITY, PEER, gap_of, plot
from tests.benchmarks.report import value_text

SIZES = table_sizes(50)
SMALL = Settings(num_steps=6, global_batch_size=16, num_held_out_rows=8, num_evaluations=3)


def criteo_line(label: int, dense: str = "1", category: str = "0000000a") -> str:
    return "\t".join([str(label), *[dense] * NUM_DENSE, *[category] * NUM_CATEGORICAL])


def write_criteo(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tables_are_as_large_as_criteos_up_to_the_cap():
    assert len(SIZES) == NUM_CATEGORICAL
    assert max(SIZES) == 50
    assert min(SIZES) == 3


def test_the_same_seed_gives_the_same_clicks_and_another_seed_others():
    teacher = Teacher(SIZES, 1.05, seed=0)
    first, again, other = (teacher.draw(100, [1, seed, 0]) for seed in (0, 0, 1))
    assert (first.ids == again.ids).all() and (first.label == again.label).all()
    assert (first.ids != other.ids).any()


def test_ids_stay_inside_their_tables_and_low_ids_are_the_frequent_ones():
    rows = Teacher(SIZES, 1.05, seed=0).draw(5000, [1, 0, 0])
    assert (rows.ids >= 0).all() and (rows.ids < np.array(SIZES)).all()
    counts = np.bincount(rows.ids[:, 2], minlength=50)
    assert counts[0] > 2 * counts[3] > 4 * counts[30]


def test_clicks_happen_as_often_as_the_teacher_says():
    rows = Teacher(SIZES, 1.05, seed=0).draw(50_000, [1, 0, 0])
    assert rows.probability is not None
    likely = rows.probability > np.median(rows.probability)
    for part in (likely, ~likely):
        assert rows.label[part].mean() == pytest.approx(rows.probability[part].mean(), abs=0.01)


def test_a_criteo_file_gives_log_counts_and_hashed_ids(tmp_path):
    path = write_criteo(
        tmp_path / "day.tsv", [criteo_line(1), criteo_line(0, dense="-2", category="ffffffff")]
    )
    rows = read_criteo(path, SIZES, 2)
    assert rows.label.tolist() == [1, 0]
    assert rows.dense[0] == pytest.approx(np.full(NUM_DENSE, math.log(2)))
    assert rows.dense[1].tolist() == [0] * NUM_DENSE
    assert rows.ids[0].tolist() == [0xA % size for size in SIZES]
    assert rows.ids[1].tolist() == [0xFFFFFFFF % size for size in SIZES]
    assert rows.probability is None


def test_missing_criteo_values_become_zero(tmp_path):
    path = write_criteo(tmp_path / "day.tsv", [criteo_line(1, dense="", category="")])
    rows = read_criteo(path, SIZES, 1)
    assert not rows.dense.any() and not rows.ids.any()


def test_a_criteo_file_with_too_few_rows_is_refused(tmp_path):
    path = write_criteo(tmp_path / "day.tsv", [criteo_line(1)])
    with pytest.raises(CriteoFormatError, match="has 1 rows, 2 are needed"):
        read_criteo(path, SIZES, 2)


@pytest.mark.parametrize("text", ["a,b,c\n1,2,3\n", "click\t" * 40])
def test_a_file_of_another_format_is_refused(tmp_path, text):
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(CriteoFormatError, match="is no Criteo TSV"):
        read_criteo(path, SIZES, 1)


def test_ranks_share_a_file_without_overlap_and_hold_out_the_rows_after_it(tmp_path):
    labels = [row % 2 for row in range(24)]
    lines = [criteo_line(label, category=f"{row:08x}") for row, label in enumerate(labels)]
    path = write_criteo(tmp_path / "day.tsv", lines)
    settings = Settings(
        num_steps=1, global_batch_size=16, num_held_out_rows=8, num_evaluations=1, criteo=str(path)
    )
    ranks = [rows_of_rank(settings, seed=3, rank=rank) for rank in range(4)]
    column = 2  # a table of more than 24 rows, so that ids are row numbers
    trained = np.concatenate([rank.train.ids[:, column] for rank in ranks])
    held_out = np.concatenate([rank.held_out.ids[:, column] for rank in ranks])
    assert sorted(trained) == list(range(16))
    assert held_out.tolist() == list(range(16, 24))


def test_batches_hold_the_rows_in_order_by_feature():
    rows = rows_of_rank(SMALL, seed=0, rank=1).train
    found = list(batches(rows, SMALL.batch_size))
    assert len(found) == SMALL.num_steps
    second = rows.ids[SMALL.batch_size : 2 * SMALL.batch_size]
    assert found[1].sparse["category_7"].values().tolist() == second[:, 7].tolist()
    assert found[1].sparse.lengths().eq(1).all()


def test_the_last_step_is_always_measured():
    assert SMALL.evaluation_steps == {2, 4, 6}
    assert 7 in Settings(num_steps=7, num_evaluations=3).evaluation_steps


def test_the_variants_are_the_peer_the_noise_floor_and_every_moment_scale():
    variants = variants_of(world_size=8, shard_group_size=2)
    assert [v.moment_scale for v in variants] == [None, 1.0, 4.0, 2.0, 1.0]
    assert [v.shard_group_size for v in variants] == [8, 8, 2, 2, 2]
    assert [v.moment_scale for v in variants_of(2, 1)] == [None, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("variant", variants_of(4, 1)[1:])
def test_the_spec_of_a_variant_is_a_valid_job(variant):
    spec = spec_of(SMALL, variant)
    assert spec.parallelism.moment_scale_value == variant.moment_scale
    assert spec.parallelism.shard_group_size == variant.shard_group_size


NES = st.lists(st.floats(0.5, 1.0), min_size=2, max_size=6)


@settings(deadline=None)
@given(NES, st.floats(-0.01, 0.01))
def test_a_gap_that_is_the_same_for_every_seed_has_no_error(peer, shift):
    middle = sum(peer) / len(peer)
    gap = gap_of([ne + shift * middle for ne in peer], peer)
    assert gap.relative == pytest.approx(shift, abs=1e-12)
    assert gap.standard_error == pytest.approx(0, abs=1e-9)


def test_a_gap_is_significant_only_when_its_error_cannot_explain_it():
    assert gap_of([1.01, 1.011], [1.0, 1.0]).is_significant
    assert not gap_of([1.01, 0.99], [1.0, 1.0]).is_significant
    assert not gap_of([1.0001, 1.0001], [1.0, 1.0]).is_significant
    assert not gap_of([1.01], [1.0]).is_significant


def results_of(ne_by_variant: dict[str, list[float]]) -> list[SeedResult]:
    seeds = zip(*ne_by_variant.values(), strict=True)
    return [
        SeedResult(
            {name: Curve([100], [ne], 1.0) for name, ne in zip(ne_by_variant, values, strict=True)},
            0.7,
        )
        for values in seeds
    ]


def test_the_report_compares_means_over_seeds_with_the_peer():
    results = results_of(
        {PEER: [0.8, 0.82], name_of_scale(4): [0.8001, 0.8199], name_of_scale(1): [0.81, 0.83]}
    )
    document = document_of(SMALL, 4, results, {})
    scaled, unscaled = document["ratios"]["gap_scaled"], document["ratios"]["gap_unscaled"]
    assert scaled["value"] == pytest.approx(0, abs=1e-12)
    assert scaled["spread"] == pytest.approx([-0.0001 / 0.81, 0.0001 / 0.81])
    assert (scaled["goal"], scaled["better"]) == (PARITY, "lower")
    assert unscaled["value"] == pytest.approx(0.01 / 0.81)
    assert unscaled["better"] == "higher"
    assert document["teacher_ne"] == 0.7
    assert len(document["runs"]) == 6


def test_the_plot_is_written_with_a_line_for_every_variant(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot is the one thing that needs it")
    path = tmp_path / "made" / "gap.svg"
    plot(path, [10, 20], {PEER: [[0.9, 0.8], [0.9, 0.8]], "2D, c=4": [[0.91, 0.8], [0.9, 0.81]]})
    assert "2D, c=4" in path.read_text() or path.stat().st_size > 1000


def test_options_reach_the_settings():
    options = parse(["--num-steps", "20", "--num-evaluations", "4", "--criteo", "day.tsv"])
    assert options.settings.num_steps == 20
    assert options.settings.criteo == "day.tsv"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--world-size", "4", "--shard-group-size", "3"],
        ["--seeds", "0"],
        ["--global-batch-size", "2049"],
        ["--num-evaluations", "0"],
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "must be" in capsys.readouterr().err


def test_a_small_gap_is_not_printed_as_zero():
    assert [value_text(value) for value in (0.97, 0.0, -0.00012)] == ["0.970", "0.000", "-0.000120"]
