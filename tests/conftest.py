"""Fixtures, marks and time limits of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.harness.databases import PostgresqlServer, SqliteTemplate, run_server
from tests.harness.processes import die_with_parent
from tests.harness.properties import load_profile
from tests.harness.wait import scale, scaled

load_profile()
_OF_TESTS = ("SHARDLOOM_CHAOS_", "SHARDLOOM_FUZZ_", "SHARDLOOM_RAY_HOSTS", "SHARDLOOM_TEST_")

REPO = Path(__file__).parents[1]
EXAMPLE_SPEC = REPO / "examples" / "movielens.yaml"

# Tests that must not run beside each other, by the fixtures that they take and by the helpers (last
# part of the module's name) that their file imports from. What comes first starts first.
_GROUPS = {
    "ray": ({"stack"}, set[str]()),
    "ranks": ({"ranks"}, {"ranks", "elastic", "elastic_ranks", "chaos", "cuda_cases"}),
    "net": (set[str](), {"machines", "ray_hosts", "emulated"}),
}
_FOLDERS_OF_RANKS = [REPO / "tests" / "integration" / name for name in ("ranks", "elastic")]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine; a worker of pytest-xdist takes the measure from its controller."""
    # Those of the developer's own stack are not meant for services and command lines of tests. Not
    # where this is imported, as by benchmarks and by processes of tests: theirs are meant.
    for name in [each for each in os.environ if each.startswith("SHARDLOOM_")]:
        if not name.startswith(_OF_TESTS):
            del os.environ[name]
    # Loading torch takes a core for some seconds, and a service of a test lives shortly.
    os.environ["SHARDLOOM_KEEP_PLANNER"] = "false"
    if hasattr(config, "workerinput"):
        die_with_parent()
        return
    scale()
    limit_s = config.getoption("timeout", None) or float(config.getini("timeout"))
    # Read by pytest-timeout, also in the workers.
    os.environ["PYTEST_TIMEOUT"] = str(scaled(limit_s))
    config.option.timeout = None


def pytest_report_header() -> str:
    """What the limits are multiplied by."""
    return f"time limits: x {scale():.2f} (SHARDLOOM_TEST_SCALE)"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect garbage of imports never, and all other rarely: it took a fifth of the tests' time.

    FastAPI's routers keep every app that includes them, so that there is more with each test.
    """
    gc.set_threshold(700, 10, 200)
    result = yield
    gc.freeze()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scale the limits of single tests, and say which tests share a worker of pytest-xdist."""
    order = list(_GROUPS)
    groups = {item: _group_of(item) for item in items}
    items.sort(key=lambda item: order.index(groups[item]) if groups[item] in order else len(order))
    for item in items:
        group = groups[item] or str(item.path.relative_to(REPO))
        item.add_marker(pytest.mark.xdist_group(group))
        if limit := item.get_closest_marker("timeout"):
            seconds = limit.args[0] if limit.args else limit.kwargs["timeout"]
            item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)


def _group_of(item: pytest.Item) -> str | None:
    """The group that a test shares with other files; None for its file alone."""
    if mark := item.get_closest_marker("xdist_group"):
        return str(mark.args[0])
    taken = set(getattr(item, "fixturenames", ()))
    helpers = _helpers_of(item)
    for group, (fixtures, modules) in _GROUPS.items():
        if taken & fixtures or helpers & modules:
            return group
    return "ranks" if item.path.parent in _FOLDERS_OF_RANKS else None


def _helpers_of(item: pytest.Item) -> set[str]:
    module = getattr(item, "module", None)
    names = {
        getattr(value, "__module__", None) or getattr(value, "__name__", "")
        for value in vars(module).values()
    }
    return {name.rpartition(".")[2] for name in names if str(name).startswith("tests.")}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips because something required is missing has failed.

    `SHARDLOOM_TEST_REQUIRE` lists words, separated by commas, and reasons name what is missing.
    """
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        words = os.environ.get("SHARDLOOM_TEST_REQUIRE", "").lower().replace(" ", "").split(",")
        if name := next((word for word in words if word and word in reason.lower()), None):
            report.outcome = "failed"
            report.longrepr = f"SHARDLOOM_TEST_REQUIRE says that {name} is here: {reason}"
    return report


@pytest.fixture(scope="session")
def small_movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared MovieLens folder of 6 000 generated ratings."""
    from trainer.datasets.movielens.prepare import MovieLensOptions, prepare_movielens
    from trainer.datasets.movielens.synthetic import generate_movielens

    folder = tmp_path_factory.mktemp("movielens")
    generate_movielens(folder / "csv", num_ratings=6000, seed=7)
    options = MovieLensOptions(row_group_rows=1024)
    prepare_movielens(folder / "csv", folder / "prepared", options=options)
    return folder / "prepared"


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """A PostgreSQL server, up for the whole test session."""
    with run_server() as server:
        yield server


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> SqliteTemplate:
    """A migrated SQLite file to copy."""
    return SqliteTemplate(tmp_path_factory.mktemp("sqlite"))
