"""`shardloom data` commands: what they print, and how they fail."""

from __future__ import annotations

from typer.testing import CliRunner

from trainer.data.manifest import load_manifest
from trainer.datasets.cli import app

RUNNER = CliRunner()


def invoke(*arguments: object):
    return RUNNER.invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_generate_prepare_and_inspect_work_in_a_row(tmp_path):
    assert invoke("generate", "movielens", tmp_path / "csv", "--ratings", 1500).exit_code == 0
    prepared = invoke(
        *("prepare", "movielens", tmp_path / "csv", tmp_path / "out"),
        *("--split", "global", "--validation-fraction", 0.2, "--history-length", 4),
    )
    assert prepared.exit_code == 0
    assert "300" in prepared.stdout
    assert "baseline user movie bias rmse" in prepared.stdout
    assert "duplicates dropped" in prepared.stdout
    options = load_manifest(tmp_path / "out").options
    assert (options["split"], options["history_length"]) == ("global", 4)
    inspected = invoke("inspect", tmp_path / "out")
    assert inspected.exit_code == 0
    assert "history_disliked" in inspected.stdout
    assert "OK: " in inspected.stdout


def test_clicks_are_generated_prepared_and_inspected_in_a_row(tmp_path):
    generated = invoke(
        *("generate", "criteo", tmp_path / "raw", "--rows", 2000),
        *("--days", 2, "--max-ids", 40, "--gzip"),
    )
    assert generated.exit_code == 0
    assert "what the teacher itself scores" in generated.stdout
    prepared = invoke(
        *("prepare", "criteo", tmp_path / "raw" / "day_0.gz", tmp_path / "raw" / "day_1.gz"),
        *(tmp_path / "out", "--split", "last_file", "--min-count", 2, "--num-partitions", 3),
    )
    assert prepared.exit_code == 0
    assert "26 vocabularies" in prepared.stdout
    manifest = load_manifest(tmp_path / "out")
    assert manifest.splits["validation"].num_rows == 1000
    assert (manifest.options["min_count"], manifest.options["num_partitions"]) == (2, 3)
    assert "OK: 28 files" in invoke("inspect", tmp_path / "out").stdout


def test_hashed_ids_are_no_vocabularies(tmp_path):
    invoke("generate", "criteo", tmp_path / "raw", "--rows", 200)
    hashed = invoke("prepare", "criteo", tmp_path / "raw", tmp_path / "out", "--ids", "hashing")
    assert hashed.exit_code == 0 and "vocabular" not in hashed.stdout


def test_bad_data_and_options_exit_with_2_and_a_message_on_stderr(tmp_path):
    (tmp_path / "day_0").write_text("1,2,3\n" * 20)
    day, out = tmp_path / "day_0", tmp_path / "out"
    for command, message in (
        (("prepare", "movielens", tmp_path / "absent", out), "absent is not a folder"),
        (("prepare", "criteo", day, out), f"{day}, line 1: 1 tab-separated columns, not 40"),
        (("inspect", tmp_path / "absent"), "absent is missing"),
        (("prepare", "movielens", tmp_path, out, "--validation-fraction", 1.5), "-fraction"),
        (("prepare", "criteo", day, out, "--seed", 2**32), "4294967295"),
        (("prepare", "criteo", day, out, "--max-ids", 2**64), "2147483648"),
        (("prepare", "criteo", day, out, "--num-hash-buckets", 2**64), "2147483648"),
        (("prepare", "movielens", tmp_path, out, "--unit-rows", 2**64), "2147483648"),
        (("prepare", "criteo", day, "/"), f"/ holds {day}, which is read"),
        (("generate", "movielens", "s3://bucket/out"), "s3://bucket/out is remote"),
    ):
        failed = invoke(*command)
        assert failed.exit_code == 2
        assert message in failed.stderr
        assert failed.stdout == ""
        assert not out.exists()
