"""`shardloom data` commands: what they print, and how they fail."""

from __future__ import annotations

import shutil
import subprocess
import sys

from typer.testing import CliRunner

from trainer.data.cli import app
from trainer.data.manifest import load_manifest

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
    options = load_manifest(tmp_path / "out").options
    assert (options["split"], options["history_length"]) == ("global", 4)
    inspected = invoke("inspect", tmp_path / "out")
    assert inspected.exit_code == 0
    assert "history_disliked" in inspected.stdout
    assert "OK: " in inspected.stdout


def test_clicks_are_generated_prepared_and_inspected_in_a_row(tmp_path):
    generated = invoke(
        *("generate", "criteo", tmp_path / "raw", "--rows", 2000, "--format", "tsv"),
        *("--days", 2, "--max-ids", 40, "--gzip"),
    )
    assert generated.exit_code == 0
    assert "what the teacher itself scores" in generated.stdout
    prepared = invoke(
        *("prepare", "criteo", tmp_path / "raw" / "day_0.gz", tmp_path / "raw" / "day_1.gz"),
        *(tmp_path / "out", "--split", "last_file", "--min-count", 2, "--num-partitions", 3),
    )
    assert prepared.exit_code == 0
    assert "26 vocabularies" in prepared.stdout and "stars" not in prepared.stdout
    manifest = load_manifest(tmp_path / "out")
    assert manifest.splits["validation"].num_rows == 1000
    assert (manifest.options["min_count"], manifest.options["num_partitions"]) == (2, 3)
    assert "OK: 28 files" in invoke("inspect", tmp_path / "out").stdout


def test_bad_clicks_exit_with_2_and_say_where(tmp_path):
    (tmp_path / "day_0").write_text("1,2,3\n" * 20)
    failed = invoke("prepare", "criteo", tmp_path / "day_0", tmp_path / "out")
    assert failed.exit_code == 2
    assert f"{tmp_path / 'day_0'}, line 1: 1 tab-separated columns, not 40" in failed.stderr
    assert not (tmp_path / "out").exists()


def test_inspect_names_a_damaged_file_unless_told_not_to_verify(prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    part = folder / "train" / "part-00001.parquet"
    body = bytearray(part.read_bytes())
    body[100] ^= 1
    part.write_bytes(body)
    failed = invoke("inspect", folder)
    assert failed.exit_code == 2
    assert f"{part} is damaged" in failed.stderr
    assert "OK" not in failed.stdout
    trusted = invoke("inspect", folder, "--no-verify")
    assert trusted.exit_code == 0
    assert "OK" not in trusted.stdout


def test_bad_data_exits_with_2_and_a_message_on_stderr(tmp_path):
    failed = invoke("prepare", "movielens", tmp_path / "absent", tmp_path / "out")
    assert failed.exit_code == 2
    assert "absent is not a folder" in failed.stderr
    assert failed.stdout == ""
    assert not (tmp_path / "out").exists()


def test_inspecting_an_unprepared_folder_fails_clearly(tmp_path):
    failed = invoke("inspect", tmp_path)
    assert failed.exit_code == 2
    assert "manifest.json" in failed.stderr


def test_an_option_out_of_range_is_refused(tmp_path):
    failed = invoke("prepare", "movielens", tmp_path, tmp_path / "o", "--validation-fraction", 1.5)
    assert failed.exit_code == 2
    assert "validation-fraction" in failed.stderr


def test_importing_the_commands_loads_no_data_library():
    code = (
        "import sys, trainer.data.cli;"
        "heavy = {'polars', 'pyarrow', 'torch', 'numpy'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
