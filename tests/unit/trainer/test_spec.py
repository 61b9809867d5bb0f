"""The job spec: what is accepted, and that every refusal names its field."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainer.spec import (
    JobSpec,
    SpecError,
    apply_overrides,
    json_schema,
    load_spec,
    parse_document,
    set_values,
    validate_spec,
)
from trainer.spec.reserved import MODULE_ATTRIBUTES

EXAMPLES = sorted((Path(__file__).parents[3] / "deploy" / "examples").glob("*.yaml"))


def minimal() -> dict[str, Any]:
    """The smallest spec that is accepted."""
    return {
        "name": "small",
        "data": {"path": "somewhere", "label": {"column": "rating"}},
        "features": [
            {"name": "user", "type": "id", "table": "users"},
            {"name": "age", "type": "dense"},
        ],
        "embedding_tables": [{"name": "users", "num_embeddings": 10, "embedding_dim": 8}],
        "model": {
            "dense_arch": {"layer_sizes": [8]},
            "over_arch": {"layer_sizes": [4, 1]},
            "tasks": [{"loss": "mse"}],
        },
        "parallelism": {"workers": 4, "shard_group_size": 2},
    }


def refusal(changes: list[str]) -> dict[str, tuple[str, str]]:
    """Field path -> (code, message) of what is wrong after `changes` to the minimal spec."""
    with pytest.raises(SpecError) as caught:
        validate_spec(apply_overrides(minimal(), changes))
    return {problem.path: (problem.code, problem.message) for problem in caught.value.problems}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_shipped_example_is_accepted(path: Path) -> None:
    assert load_spec(path.read_text()).name


def test_defaults_give_a_synced_2d_job() -> None:
    spec = validate_spec(minimal())
    assert spec.parallelism.num_replicas == 2
    assert spec.parallelism.moment_scale_value == 2.0
    assert spec.parallelism.sync.every_steps == 1
    assert spec.model.task.metric_names == ("rmse", "mae")


def test_json_is_read_like_yaml() -> None:
    assert load_spec(json.dumps(minimal())) == load_spec(yaml.safe_dump(minimal()))


def test_a_spec_survives_its_own_json() -> None:
    spec = validate_spec(minimal())
    assert load_spec(spec.model_dump_json(exclude_none=True)) == spec


_SHARDING = "embedding_tables[0].constraints.sharding_types"
_PARTITION = "embedding_tables[0].constraints.min_partition"
_DATA_TYPE = "embedding_tables[0].data_type"
_ROWS = "embedding_tables[0].num_embeddings"
_EVERY_SYNCS = "parallelism.divergence_check.every_syncs"


@pytest.mark.parametrize(
    ("change", "path", "code"),
    [
        ("nonsense=1", "nonsense", "extra_forbidden"),
        ("data.batch_sise=3", "data.batch_sise", "extra_forbidden"),
        ("data.batch_size=many", "data.batch_size", "int_parsing"),
        ("data.batch_size=0", "data.batch_size", "greater_than"),
        ("embedding_tables[0].embedding_dim=6", "embedding_tables[0].embedding_dim", "multiple_of"),
        ("embedding_tables[0].num_embeddings=-1", "embedding_tables[0].num_embeddings", None),
        ("features[0].table=movies", "features[0].table", "unknown_table"),
        ("features[1].name=user", "features[1].name", "duplicate_name"),
        ("model.tasks[0].metrics=[ne]", "model.tasks[0].metrics", "metric_mismatch"),
        ("model.tasks[0].metrics=[auc]", "model.tasks[0].auc_threshold", "missing_threshold"),
        ("model.tasks[0].metrics=[mae, mae]", "model.tasks[0].metrics", "duplicate_metric"),
        ("model.arch=movielens", "model.transformer", "missing_section"),
        ("name=Not Good", "name", "string_pattern_mismatch"),
        ("parallelism.workers=5", "parallelism.workers", "not_divisible"),
        ("parallelism.moment_scale=3", "parallelism.moment_scale", "moment_scale"),
        ("parallelism.moment_scale=-1", "parallelism.moment_scale", None),
        ("model.over_arch.layer_sizes=[4, 2]", "model.over_arch.layer_sizes", "over_arch_width"),
        ("parallelism.moment_scale=0", "parallelism.moment_scale", None),
        ("parallelism.sync.full_above=1.5", "parallelism.sync.full_above", "less_than_equal"),
        ("parallelism.divergence_check={every_syncs: 0}", _EVERY_SYNCS, "greater_than"),
        ("parallelism.constraints={users: {}}", "parallelism.constraints", "extra_forbidden"),
        ("optimizer.sparse.weight_decay=-1", "optimizer.sparse.weight_decay", None),
        ("optimizer.schedule={decay: cosign}", "optimizer.schedule.decay", "literal_error"),
        ("embedding_tables[0].constraints.sharding_types=[tw]", f"{_SHARDING}[0]", None),
        ("embedding_tables[0].constraints.min_partition=6", _PARTITION, "multiple_of"),
        ("embedding_tables[0].constraints.min_partition=12", _PARTITION, "min_partition"),
        ("features[0].weights_column=w", "features[0].weights_column", "unexpected_weights"),
        ("features[0].max_length=3", "features[0].max_length", "unexpected_max_length"),
        ("optimizer.sparse.lr=.inf", "optimizer.sparse.lr", "finite_number"),
        ("optimizer.schedule={min_ratio: 0.5}", "optimizer.schedule.min_ratio", "no_effect"),
        ("embedding_tables[0].num_embeddings=99999999999999", _ROWS, None),
        ("embedding_tables[0].data_type=bf16", _DATA_TYPE, "unsupported_data_type"),
        ("training.trace={first_step: 1, ranks: [4]}", "training.trace.ranks", "trace_ranks"),
    ],
)
def test_a_fault_names_its_field(change: str, path: str, code: str | None) -> None:
    problems = refusal([change])
    assert list(problems) == [path]
    assert code is None or problems[path][0] == code


def test_text_that_no_answer_could_carry_is_refused() -> None:
    for document in (
        minimal() | {"labels": {"team": "\ud800"}},
        minimal() | {"\ud800": 1},
        minimal() | {"features": [{"name": "u", "type": "id", "table": "\ud800"}]},
    ):
        with pytest.raises(SpecError) as caught:
            validate_spec(document)
        for problem in caught.value.problems:
            f"{problem.path} {problem.message}".encode()


def test_workers_that_do_not_fit_say_which_would() -> None:
    _, message = refusal(["parallelism.workers=5"])["parallelism.workers"]
    assert "4 or 6" in message


def test_all_faults_are_reported_at_once() -> None:
    problems = refusal(["name=BAD", "data.batch_size=0", "nonsense=1"])
    assert set(problems) == {"name", "data.batch_size", "nonsense"}


def test_a_syntax_error_names_line_and_column() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("name: x\ndata: [")
    assert caught.value.problems[0].path.startswith("line 2")


def test_overrides_reach_lists_and_make_missing_sections() -> None:
    spec = validate_spec(
        apply_overrides(
            minimal(), ["embedding_tables[0].num_embeddings=99", "training.max_steps=7"]
        )
    )
    assert spec.embedding_tables[0].num_embeddings == 99
    assert spec.training.max_steps == 7


@pytest.mark.parametrize("override", ["no-equals-sign", "features[9].name=x", "=3"])
def test_an_override_that_cannot_be_set_says_so(override: str) -> None:
    with pytest.raises(SpecError) as caught:
        apply_overrides(minimal(), [override])
    assert caught.value.problems[0].code == "override"


@pytest.mark.parametrize(
    "path",
    ["name[0]", "features[" + "9" * 5000 + "]", "name=2001 #", "a..b", "", "features.x", "b["],
)
def test_a_path_that_leads_nowhere_sets_nothing(path: str) -> None:
    with pytest.raises(SpecError) as caught:
        set_values(minimal(), {path: "x"})
    [problem] = caught.value.problems
    assert problem.code == "override"
    assert len(problem.path) < 600


def test_values_are_set_as_they_are_and_never_read_as_yaml() -> None:
    text = "{<<: [*a, *a]}"
    changed = set_values(minimal(), {"name": text, "embedding_tables[0].num_embeddings": 99})
    assert changed["name"] == text
    assert changed["embedding_tables"][0]["num_embeddings"] == 99


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(SpecError, match="nested"):
        set_values(minimal(), {"labels.a": nested(900)})
    for text in ("[" * 900, "[" * 100_000, "{a: " * 900):
        with pytest.raises(SpecError):
            parse_document(text)
    with pytest.raises(SpecError, match="nested"):
        apply_overrides({"a": nested(5000)}, [])


def test_a_few_lines_of_aliases_cannot_fill_the_memory() -> None:
    names = [f"a{number}" for number in range(30)]
    lists = ["- &a0 [1, 2]"]
    maps = ["- &a0 {x: 1}"]
    for before, name in pairwise(names):
        lists.append(f"- &{name} [*{before}, *{before}, *{before}]")
        maps.append(f"- &{name} {{<<: [*{before}, *{before}, *{before}]}}")
    for text in ("\n".join(lists), "\n".join(maps), "&a [*a]", "x" * 2_000_000):
        with pytest.raises(SpecError):
            parse_document(text)
    assert parse_document("a: &x {b: 1}\nc: {<<: *x}\nd: *x")["d"] == {"b": 1}


def test_of_very_many_faults_some_are_told_soon() -> None:
    with pytest.raises(SpecError) as caught:
        validate_spec({**minimal(), "features": [1] * 100_000})
    assert len(caught.value.problems) <= 200


def test_a_date_stays_a_text_and_a_wrong_number_is_a_fault() -> None:
    assert apply_overrides(minimal(), ["name=2001-99-99"])["name"] == "2001-99-99"
    with pytest.raises(SpecError):
        parse_document("!!timestamp 2001-99-99")


def test_overrides_leave_the_document_as_it_was() -> None:
    document = minimal()
    before = copy.deepcopy(document)
    apply_overrides(document, ["data.batch_size=1"])
    assert document == before


def test_the_schema_describes_every_section() -> None:
    schema = json_schema()
    assert set(minimal()) <= set(schema["properties"])
    assert schema["additionalProperties"] is False


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["name", "data", "features", "parallelism", "x"]), inner, max_size=4
            )
        ),
    )
)
def test_any_document_is_accepted_or_refused_with_paths(document: Any) -> None:
    with pytest.raises(SpecError) as caught:
        validate_spec(document)
    assert all(problem.path and problem.message for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("parallelism.sync.every_steps=4", "sync"),
        ("parallelism.dense=at_sync", "dense"),
        ("parallelism.divergence_check={every_syncs: 2}", "divergence_check"),
    ],
)
def test_what_needs_a_second_copy_is_refused_with_one(change: str, field: str) -> None:
    problems = refusal(["parallelism.shard_group_size=4", change])
    code, message = problems[f"parallelism.{field}"]
    assert code == "single_replica"
    assert "one copy" in message


def test_one_copy_without_a_sync_is_plain_model_parallel() -> None:
    spec = validate_spec(apply_overrides(minimal(), ["parallelism.shard_group_size=4"]))
    assert spec.parallelism.num_replicas == 1
    assert load_spec(spec.model_dump_json()) == spec


def test_scaling_moments_that_sgd_does_not_keep_is_refused() -> None:
    problems = refusal(["optimizer.sparse.name=sgd", "parallelism.moment_scale=2"])
    assert problems["parallelism.moment_scale"][0] == "moment_scale"


@pytest.mark.parametrize(("name", "scale"), [("sgd", 1), ("adagrad", 2), ("row_wise_adagrad", 2)])
def test_the_moment_scale_is_m_where_the_optimizer_has_moments(name: str, scale: float) -> None:
    spec = validate_spec(apply_overrides(minimal(), [f"optimizer.sparse.name={name}"]))
    assert spec.moment_scale == scale


def test_decaying_a_half_precision_table_is_refused_as_it_would_have_no_effect() -> None:
    changes = ["embedding_tables[0].data_type=fp16", "optimizer.sparse.weight_decay=0.01"]
    assert refusal(changes)[_DATA_TYPE][0] == "weight_decay"


@pytest.mark.parametrize("name", ["items", "type", "_modules", "_"])
def test_a_table_named_like_an_attribute_of_its_module_is_refused(name: str) -> None:
    problems = refusal([f"embedding_tables[0].name={name}", f"features[0].table={name}"])
    assert problems["embedding_tables[0].name"][0] == "reserved_name"


def test_the_reserved_names_are_those_of_the_installed_torch() -> None:
    from torch import nn

    assert {n for n in dir(nn.ModuleDict()) if not n.startswith("_")} == MODULE_ATTRIBUTES


@pytest.mark.parametrize("kind", ["data_parallel", "table_row_wise", "grid_shard"])
def test_a_sequence_table_refuses_shardings_that_torchrec_lacks(kind: str) -> None:
    problems = refusal(["features[0].type=sequence", f"{_SHARDING}=[{kind}]"])
    code, message = problems[_SHARDING]
    assert code == "unsupported_sharding"
    assert "EmbeddingCollection" in message


def test_a_table_is_looked_up_pooled_or_in_sequence_but_not_both() -> None:
    document = minimal()
    document["features"].append({"name": "seen", "type": "id_list", "table": "users"})
    document["features"].append({"name": "clicks", "type": "sequence", "table": "users"})
    with pytest.raises(SpecError) as caught:
        validate_spec(document)
    assert [(p.path, p.code) for p in caught.value.problems] == [
        ("features[3].table", "shared_table")
    ]


def test_an_id_that_shares_the_table_of_a_sequence_is_a_sequence_of_one() -> None:
    document = minimal()
    document["features"].append({"name": "clicks", "type": "sequence", "table": "users"})
    spec = validate_spec(document)
    assert [f.name for f in spec.sequence_features] == ["user", "clicks"]
    assert [f.length_limit for f in spec.sequence_features] == [1, 50]
    assert spec.pooled_features == ()


def test_tables_larger_than_the_group_s_memory_are_refused_with_the_numbers() -> None:
    # 1000 rows of (8 * 4 + 4) bytes = 36 000; two workers of 20 000 bytes less 15 % hold 34 000.
    changes = ["embedding_tables[0].num_embeddings=1000"]
    code, message = refusal([*changes, "resources.memory_bytes_per_worker=20000"])[
        "embedding_tables[0].num_embeddings"
    ]
    assert code == "table_too_large"
    assert "sharding group of 2 workers" in message
    whole = [*changes, f"{_SHARDING}=[table_wise]", "resources.memory_bytes_per_worker=40000"]
    _, message = refusal(whole)["embedding_tables[0].num_embeddings"]
    assert "one worker" in message
    fits = [*changes, "resources.memory_bytes_per_worker=22000"]
    assert validate_spec(apply_overrides(minimal(), fits)).embedding_tables[0].num_embeddings


def test_a_setting_that_would_do_nothing_is_refused() -> None:
    sgd = ["optimizer.sparse.name=sgd", "parallelism.sync.optimizer_state=never"]
    assert refusal(sgd)["parallelism.sync.optimizer_state"][0] == "no_effect"
    alone = ["parallelism.shard_group_size=1", "parallelism.all_to_all.forward=bf16"]
    assert refusal(alone)["parallelism.all_to_all"][0] == "no_effect"
    late = ["training.max_steps=5", "training.trace={first_step: 6}"]
    assert refusal(late)["training.trace.first_step"][0] == "no_effect"
    pooled = ["features[0].type=sequence", "embedding_tables[0].pooling=mean"]
    assert refusal(pooled)["embedding_tables[0].pooling"][0] == "no_effect"


def test_constraints_in_the_wrong_place_are_told_where_they_belong() -> None:
    problems = refusal(["parallelism.constraints={nobody: {sharding_types: [row_wise]}}"])
    assert "embedding_tables[].constraints" in problems["parallelism.constraints"][1]


def test_a_stored_spec_stays_readable_when_newer_checks_would_refuse_it() -> None:
    document = apply_overrides(
        minimal(), ["embedding_tables[0].name=items", "features[0].table=items"]
    )
    with pytest.raises(SpecError):
        validate_spec(document)
    stored = JobSpec.model_validate(document, context={"stored": True})
    assert stored.embedding_tables[0].name == "items"


@pytest.mark.parametrize(
    ("sync", "num_copies"),
    [
        ("{mode: touched_rows, overlap: true, dtype: bf16}", 0),
        ("{mode: full}", 0),
        ("{mode: full, dtype: bf16}", 1),
        ("{mode: full, overlap: true}", 2),
        ("{mode: full, overlap: true, dtype: fp16}", 3),
    ],
)
def test_whole_copies_that_a_sync_keeps_count_as_memory(sync: str, num_copies: int) -> None:
    # One table of 36 000 bytes for each of (1 + copies), over two workers less 15 %.
    needed_bytes = (1 + num_copies) * 36_000 / 2 / 0.85
    table = ["embedding_tables[0].num_embeddings=1000", f"parallelism.sync={sync}"]
    enough = [*table, f"resources.memory_bytes_per_worker={int(needed_bytes) + 1}"]
    assert validate_spec(apply_overrides(minimal(), enough))
    too_little = [*table, f"resources.memory_bytes_per_worker={int(needed_bytes) - 10}"]
    assert refusal(too_little)["embedding_tables[0].num_embeddings"][0] == "table_too_large"


def test_weight_decay_makes_a_sync_full_and_so_costs_its_copies() -> None:
    changes = ["parallelism.sync.overlap=true", "optimizer.sparse.weight_decay=0.1"]
    assert validate_spec(apply_overrides(minimal(), changes)).num_sync_copies == 2


def test_a_job_says_where_it_stands_in_the_queue() -> None:
    spec = validate_spec(minimal())
    assert (spec.project, spec.priority, spec.preemptible) == ("default", 0, True)
    changed = {"project": "ads", "priority": 1000, "preemptible": False}
    spec = validate_spec({**minimal(), **changed})
    assert (spec.project, spec.priority, spec.preemptible) == ("ads", 1000, False)


@pytest.mark.parametrize("change", ["project=Ads Team", "priority=1001", "priority=-1"])
def test_a_place_in_the_queue_that_nobody_can_have_is_refused(change: str) -> None:
    assert set(refusal([change])) == {change.partition("=")[0]}
