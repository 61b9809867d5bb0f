"""The pure part of the benchmarks: pairs, ratios, verdicts and how they are written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.benchmarks import paper_tables, two_d
from tests.benchmarks.elastic_jobs import pause_s
from tests.benchmarks.report import (
    SKIPPED,
    BenchmarkError,
    BenchmarkReport,
    Goal,
    Run,
    is_met,
    main,
    order_of_pair,
    ratio_of,
    run_pairs,
    value_text,
)

GOAL = Goal("speed", "rows_per_s", "rows/s", goal=0.97, better="higher", peer_name="bare script")


def runs_of(*pairs: tuple[float, float]) -> list[Run]:
    return [
        Run(number, side, {"rows_per_s": value})
        for number, (ours, peer) in enumerate(pairs)
        for side, value in (("ours", ours), ("peer", peer))
    ]


def test_both_sides_run_in_every_pair_and_take_turns_to_go_first():
    calls: list[str] = []

    def measure(side: str):
        return lambda: calls.append(side) or {"rows_per_s": 1.0}

    runs = run_pairs(3, measure("ours"), measure("peer"))
    assert calls == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert [(run.pair, run.side) for run in runs] == [
        (pair, side) for pair in range(3) for side in order_of_pair(pair)
    ]


def test_a_ratio_is_the_median_of_ours_over_the_median_of_the_peer():
    ratio = ratio_of(GOAL, runs_of((90.0, 100.0), (99.0, 100.0), (10.0, 200.0)))
    assert (ratio["ours"], ratio["peer"]) == (90.0, 100.0)
    assert ratio["value"] == pytest.approx(0.9)
    assert ratio["spread"] == pytest.approx([0.05, 0.99])


def test_a_pair_that_lacks_one_side_is_an_error_and_no_win():
    with pytest.raises(BenchmarkError, match="speed"):
        ratio_of(GOAL, runs_of((90.0, 100.0))[:1])
    with pytest.raises(BenchmarkError):
        ratio_of(GOAL, [])


def test_the_goal_binds_from_the_side_that_is_better():
    for better, value, met in (
        ("higher", 0.98, True),
        ("higher", 0.96, False),
        ("lower", 0.98, False),
    ):
        assert is_met(ratio_of(replace(GOAL, better=better), runs_of((value, 1.0)))) is met
    # A small gap is not printed as zero.
    assert [value_text(value) for value in (0.97, 0.0, -0.00012)] == ["0.970", "0.000", "-0.000120"]


def test_the_command_writes_the_agreed_json_and_says_0(tmp_path, monkeypatch, capsys):
    report = BenchmarkReport("speed", {"world_size": 4}, [GOAL], runs_of((98.0, 100.0)))
    path = tmp_path / "out" / "speed.json"
    monkeypatch.setattr("sys.argv", ["speed", "--json", str(path)])
    assert main(lambda num_pairs: report, default_pairs=1, description="") == 0

    document = json.loads(path.read_text())
    assert set(document) == {"benchmark", "machine", "settings", "ratios", "runs"}
    ratio = document["ratios"]["speed"]
    assert {"value", "goal", "better", "ours", "peer", "peer_name"} <= set(ratio)
    assert ratio["value"] == pytest.approx(0.98)
    assert len(document["runs"]) == 2
    assert "0.980" in capsys.readouterr().out


def fail(num_pairs: int) -> BenchmarkReport:
    raise BenchmarkError("the peer script is not there")


@pytest.mark.parametrize(
    ("run", "code", "said"),
    [
        (fail, 1, "the peer script is not there"),
        (two_d.run, SKIPPED, "emulated hosts need root"),
    ],
)
def test_a_benchmark_that_cannot_measure_says_why(run, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(two_d, "missing_requirement", lambda: "emulated hosts need root")
    path = tmp_path / "speed.json"
    monkeypatch.setattr("sys.argv", ["speed", "--json", str(path)])
    assert main(run, default_pairs=1, description="") == code
    assert said in capsys.readouterr().err
    assert not path.exists()


STEADY = [float(second) for second in range(30)]


def test_a_pause_is_what_a_wait_is_longer_than_usual() -> None:
    assert pause_s([*STEADY, 33.5, 34.5, 35.5], began=29.5, ended=35.0) == pytest.approx(3.5)
    # Waits outside the time looked at do not count.
    assert pause_s([*STEADY, 30.0, 31.0, 41.0], began=29.5, ended=32.0) == 0.0
    with pytest.raises(BenchmarkError, match="before and after"):
        pause_s(STEADY, began=29.5, ended=99.0)


def test_the_paper_is_predicted_from_at_most_a_third_of_its_cells():
    document = paper_tables.report().document({})
    missed = {key for key, ratio in document["ratios"].items() if not is_met(ratio)}
    assert missed == set()
    used = [row for row in document["rows"] if row["used"]]
    assert len(used) == 15
    assert not [row for row in used if row["table"] == 2 and row["cell"] == "qps"]
