"""The scorer over a small export, without a socket."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest
from anyio.to_thread import current_default_thread_limiter
from fastapi.testclient import TestClient

from tests.harness.service import problem_in
from tests.harness.wait import scaled, wait_for
from tests.unit.trainer.export.export_case import rows
from trainer.errors import ColumnError
from trainer.export.predict import Predictor
from trainer.export.server import MAX_BODY_BYTES, MAX_ROWS, create_scorer

GOOD = {"age": 1.0, "user": 3, "colour": "red", "mean": 3.0, "spread": 1.0}


@pytest.fixture(scope="module")
def http(exported: Path) -> TestClient:
    return TestClient(create_scorer(exported))


def test_a_batch_is_scored_in_order(http: TestClient, predictor: Predictor) -> None:
    names = [each["name"] for each in http.get("/v1/model").json()["inputs"]]
    table = rows(30).select(names)
    answer = http.post("/v1/predict", json={"rows": table.to_pylist()}).json()
    wanted = predictor.predict(table)["stars"]
    assert [row["stars"] for row in answer["predictions"]] == pytest.approx(wanted.tolist())
    model = {"job": "tiny", "checkpoint": "step-00000020-a0-r0", "step": 20, "quantize": "int8"}
    assert answer["model"] == model


def test_raw_values_are_made_ids_by_the_vocabularies_of_the_data(
    http: TestClient, predictor: Predictor
) -> None:
    by_id = [GOOD | {"user": 3}, GOOD | {"user": 0}, GOOD | {"user": 1, "seen": [2, 0]}]
    raw = [GOOD | {"user": "cid"}, GOOD | {"user": "zoe"}, GOOD | {"user": "ann"}]
    raw[2]["seen"] = ["bob", "zoe"]
    columns = {"user": "user", "seen": "user"}
    answer = http.post("/v1/predict", json={"rows": raw, "raw": columns}).json()
    wanted = http.post("/v1/predict", json={"rows": by_id}).json()
    assert answer["predictions"] == wanted["predictions"]
    # A table may have columns that no feature reads.
    table = pa.Table.from_pylist([{"seen": None, "note": "new"} | row for row in raw])
    found = predictor.predict(table, columns)["stars"].tolist()
    assert found == pytest.approx([row["stars"] for row in wanted["predictions"]])
    numbers = rows(2).drop_columns("colour").append_column("colour", pa.array([7, 8]))
    with pytest.raises(ColumnError, match=r"colour.*but in the training data it holds text"):
        predictor.predict(numbers)


@pytest.mark.parametrize(
    ("row", "raw", "path", "message"),
    [
        ({"user": "ann"}, {"user": "movie"}, "rows[0].user", "there are: user"),
        ({"user": 3}, {"user": "user"}, "rows[1].user", "3 is not a string"),
        ({"seen": ["ann", 3]}, {"seen": "user"}, "rows[1].seen", "['ann', 3] is not a string"),
        ({"user": "ann"}, {"user": "../../user"}, "rows[0].user", "no vocabulary"),
        (
            {"user": 3},
            {"usr": "user"},
            "rows[0].usr",
            "no input of ids; those are user, tags, seen",
        ),
        ({"colour": "red"}, {"colour": "user"}, "rows[0].colour", "is no input of ids"),
    ],
)
def test_raw_values_that_no_vocabulary_fits_are_refused(
    http: TestClient, row: dict[str, Any], raw: dict[str, str], path: str, message: str
) -> None:
    rows = [GOOD | dict.fromkeys(row), GOOD | row]
    response = http.post("/v1/predict", json={"rows": rows, "raw": raw})
    (fault,) = problem_in(response, 422, "bad_row")["fields"]
    assert message in fault["message"]
    assert fault["path"] == path


def test_a_row_that_cannot_be_scored_is_named(http: TestClient) -> None:
    response = http.post("/v1/predict", json={"rows": [GOOD, GOOD | {"user": 99}]})
    (fault,) = problem_in(response, 422, "bad_row")["fields"]
    assert fault["path"] == "rows[1].user"
    assert "0 to 39" in fault["message"]
    content, kind = '{"rows": [{"\\ud800": 1}]}', {"Content-Type": "application/json"}
    response = http.post("/v1/predict", content=content, headers=kind)
    (fault,) = problem_in(response, 422, "bad_row")["fields"]
    assert "is no input" in fault["message"]
    # A prediction that is no number is refused with its row.
    large = GOOD | {"spread": 3e38, "mean": 3e38, "age": 3e38}
    response = http.post("/v1/predict", json={"rows": [GOOD, large]})
    (fault,) = problem_in(response, 422, "bad_row")["fields"]
    assert fault["path"] == "rows[1].stars"


def test_a_body_of_another_shape_is_refused(http: TestClient) -> None:
    for body, path in (
        ({}, "rows"),
        ({"rows": []}, "rows"),
        ({"rows": [3]}, "rows[0]"),
        ({"rows": [GOOD] * (MAX_ROWS + 1)}, "rows"),
        ({"rows": [GOOD], "row": 1}, "row"),
        ([GOOD], "body"),
    ):
        problem = problem_in(http.post("/v1/predict", json=body), 422, "invalid_request")
        assert [fault["path"] for fault in problem["fields"]] == [path]


def test_what_is_no_json_or_too_large_or_not_there_is_a_problem(http: TestClient) -> None:
    json_type = {"Content-Type": "application/json"}
    broken = http.post("/v1/predict", content=b'{"rows": [', headers=json_type)
    assert problem_in(broken, 422, "invalid_request")["fields"][0]["path"] == "body"
    large = http.post("/v1/predict", content=b" " * (MAX_BODY_BYTES + 1), headers=json_type)
    problem_in(large, 413, "body_too_large")
    endless = http.post("/v1/predict", content=iter([b"{}"]), headers=json_type)
    problem_in(endless, 411, "length_required")
    problem_in(http.get("/v1/other"), 404, "http_error")
    problem_in(http.get("/v1/predict"), 405, "http_error")


def test_health_and_metrics(http: TestClient) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    before = _sample(http, "scorer_rows_total")
    assert http.post("/v1/predict", json={"rows": [GOOD] * 5}).status_code == 200
    assert _sample(http, "scorer_rows_total") == before + 5
    assert _sample(http, 'scorer_requests_total{status="200"}') >= 1


def test_health_is_told_while_requests_wait_to_be_scored(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict, begun, may_end = Predictor.predict, list[int](), Event()

    def slow(predictor: Predictor, rows: Any, *raw: Any) -> Any:
        if len(rows) > 1:
            begun.append(len(rows))
            may_end.wait()
        return predict(predictor, rows, *raw)

    monkeypatch.setattr(Predictor, "predict", slow)
    with TestClient(create_scorer(exported)) as http, ThreadPoolExecutor(5) as pool:
        assert http.portal
        http.portal.call(lambda: setattr(current_default_thread_limiter(), "total_tokens", 4))
        for _ in range(4):
            pool.submit(http.post, "/v1/predict", json={"rows": [GOOD] * 2})
        try:
            wait_for(lambda: len(begun) == 4, "four requests to be scored")
            health = pool.submit(http.get, "/healthz").result(scaled(10))
        finally:
            may_end.set()
    assert health.json() == {"status": "ok"}


def _sample(http: TestClient, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def test_what_scoring_raises_is_a_problem_and_is_counted(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Predictor, "_outputs", lambda *_: 1 / 0)
    problem = problem_in(http.post("/v1/predict", json={"rows": [GOOD]}), 500, "internal_error")
    assert problem["detail"] == "the rows could not be scored; the scorer's log says why"
    assert _sample(http, 'scorer_requests_total{status="500"}') == 1


def test_the_example_in_the_openapi_document_can_be_scored(http: TestClient) -> None:
    document = http.get("/openapi.json").json()
    body = document["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]
    (example,) = body["examples"].values()
    assert http.post("/v1/predict", json=example["value"]).status_code == 200
