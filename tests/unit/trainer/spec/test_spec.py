"""The job spec: what is accepted, and that every refusal names its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import REPO
from tests.harness.builders import spec_document
from trainer.spec import json_schema, load_spec, validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec
from trainer.spec.parse import apply_overrides, parse_document, set_values
from trainer.spec.tables import MODULE_ATTRIBUTES
from trainer.spec.training import SparseOptimizerName

EXAMPLES = sorted((REPO / "examples").glob("*.yaml"))


def changed(*changes: str) -> JobSpec:
    """A small spec, 4 workers with L = 2, after `changes`, of which `; ` separates several."""
    overrides = [each for change in changes for each in change.split("; ")]
    return validate_spec(apply_overrides(spec_document(), overrides))


def refusal(*changes: str) -> dict[str, tuple[str, str]]:
    """Field path -> (code, message) of what is wrong after `changes` to the small spec."""
    with pytest.raises(SpecError) as caught:
        changed(*changes)
    return {problem.path: (problem.code, problem.message) for problem in caught.value.problems}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_shipped_example_survives_its_own_json_which_is_read_like_yaml(path: Path) -> None:
    spec = load_spec(path.read_text())
    assert load_spec(spec.model_dump_json()) == spec


AUTO = "parallelism.shard_group_size=auto; parallelism.placement=auto"
SURVIVE = "parallelism.survive={hosts: 1}; parallelism.workers={min: 2, max: 6}"
ROWS = "embedding_tables[0].num_embeddings"
# 1000 rows of (8 * 4 + 4) bytes = 36 000. Two workers of 20 000 bytes less 15 % hold 34 000, as do
# four of 10 000, which may be one group where that is not chosen yet.
MANY = f"{ROWS}=1000; resources.memory_bytes_per_worker="
LIMITS = "embedding_tables[0].constraints"
WAYS = f"{LIMITS}.sharding_types"
CACHED = f"{LIMITS}.compute_kernel=fused_uvm_caching"
DYNAMIC = (
    "embedding_tables[0].num_embeddings=64; embedding_tables[0].dynamic={}; "
    "parallelism.workers=2; parallelism.shard_group_size=2"
)
# A sequence and a candidate of one table.
MOVIELENS = (
    "features=[{name: seen, type: sequence, table: users}, {name: user, type: id, table: users}, "
    "{name: age, type: dense}]; model.arch=movielens; model.transformer="
)
EVERY = "training.accumulate_steps=4; training.report_every_steps=8"
# Changes => field, code (- for any) and a part of the message.
FAULTS = f"""
nonsense=1 => nonsense extra_forbidden unknown field; `shardloom spec schema` lists all
training.epoch=3 => training.epoch extra_forbidden did you mean 'epochs'?
embedding_tables[0].num_embedding=3
    => embedding_tables[0].num_embedding extra_forbidden did you mean 'num_embeddings'?
name=Not Good => name string_pattern_mismatch must be 1 to 63 of a-z
project=Ads_Team => project string_pattern_mismatch must be 1 to 63 of a-z
labels={{team: "a b"}} => labels.team string_pattern_mismatch must be 1 to 63 of A-Z
labels={{"a,b": c}} => labels.a,b string_pattern_mismatch must be 1 to 63 of A-Z
features[0].column=user-id => features[0].column string_pattern_mismatch rename a column
training.float=3 => training.float extra_forbidden
parallelism.workers={{min: 2, max: 4, int: 3}} => parallelism.workers.int extra_forbidden
parallelism.workers={{min: 2, max: 4, mix: 3}}
    => parallelism.workers.mix extra_forbidden did you mean 'min'?
training=3 => training model_type a mapping of fields
data.batch_size=1{"0" * 400} => data.batch_size bounds
resources.cpus_per_worker=1.0e-320 => resources.cpus_per_worker bounds
resources.cpus_per_worker=1.0e+300 => resources.cpus_per_worker bounds
resources.queue=ads => resources.queue shared_cluster set resources.cluster to own
resources.deadline_s=60 => resources.deadline_s shared_cluster set resources.cluster to own
resources={{cluster: own, queue: a_b}} => resources.queue string_pattern_mismatch
recovery.min_hang_s=1.0e+300 => recovery.min_hang_s bounds at most 1e+09
parallelism.workers=16386 => parallelism.workers bounds at most 16384
parallelism.workers={{min: 2, max: 1{"0" * 400}}} => parallelism.workers.max bounds
parallelism.spares=16385 => parallelism.spares bounds
features[0].table=movies => features[0].table unknown_table
features[1].column=rating => features[1].column label_as_feature 'rating' is the label
model.tasks[0].label={{column: age}} => features[1].column label_as_feature 'age' is the label
features[1].name=user_id => features[1].name duplicate_name
features[0].weights_column=w => features[0].weights_column unexpected_weights
features[0].max_length=3 => features[0].max_length unexpected_max_length
model.tasks[0].metrics=[ne] => model.tasks[0].metrics metric_mismatch
model.tasks[0].metrics=[auc] => model.tasks[0].auc_threshold missing_threshold
model.tasks[0].metrics=[mae, mae] => model.tasks[0].metrics duplicate_metric
model.tasks[0].auc_threshold=0.5; model.tasks[0].loss=bce
    => model.tasks[0].auc_threshold unexpected_threshold
model.tasks=[{{loss: mse}}, {{loss: bce}}] => model.tasks duplicate_name
model.arch=movielens => model.transformer missing_section
model.transformer={{sequence: a, candidate: b}} => model.transformer unexpected_section
{MOVIELENS}{{sequence: user, candidate: user}} => model.transformer.sequence unknown_feature
{MOVIELENS}{{sequence: seen, candidate: age}} => model.transformer.candidate unknown_feature
{MOVIELENS}{{sequence: seen, candidate: user, num_heads: 3}}
    => model.transformer.num_heads num_heads
{MOVIELENS}{{sequence: seen, candidate: user, num_layers: 1001}}
    => model.transformer.num_layers bounds at most 1000
model.arch=dcn_v2; model.interaction_arch={{num_layers: 1001}}
    => model.interaction_arch.num_layers bounds at most 1000
model.over_arch.layer_sizes=[4, 2] => model.over_arch.layer_sizes over_arch_width
model.module=towers => model.module - package.module:Class
model.module="../evil:Towers" => model.module -
model.module=towers:Towers; model.code=../{"a" * 61} => model.code -
model.code={"ab" * 32} => model.code unexpected_field
model.options={{width: 8}} => model.options unexpected_field
model.module=towers:Towers; model.options={{width: .nan}} => model.options.width finite_number
optimizer.sparse.lr=.inf => optimizer.sparse.lr finite_number
optimizer.schedule={{min_ratio: 0.5}} => optimizer.schedule.min_ratio no_effect
training.early_stopping={{patience: 1}}; data.split={{validation: null}}
    => training.early_stopping no_validation
training.dense_precision=tf32; resources.device=cpu => training.dense_precision no_effect
parallelism.planner.compute_kernel=auto; parallelism.planner.cache_load_factor=1
    => parallelism.planner.cache_load_factor less_than
parallelism.planner.cache_load_factor=0.5 => parallelism.planner.cache_load_factor no_effect
{LIMITS}.cache_load_factor=0.5 => {LIMITS}.cache_load_factor no_effect
{CACHED}; resources.device=cpu => {LIMITS}.compute_kernel needs_cuda 'users'
parallelism.planner.compute_kernel=fused_uvm_caching; resources.device=cpu
    => parallelism.planner.compute_kernel needs_cuda
{CACHED}; {WAYS}=[data_parallel] => {WAYS} unsupported_sharding
{EVERY}; checkpoint.every_steps=6 => checkpoint.every_steps accumulate_steps
{EVERY}; training.report_every_steps=10 => training.report_every_steps accumulate_steps
{EVERY}; parallelism.placement=inter_host; parallelism.sync.every_steps=6
    => parallelism.sync.every_steps accumulate_steps
{EVERY}; {SURVIVE}; parallelism.sync.every_steps=6
    => parallelism.sync.every_steps accumulate_steps
{EVERY}; {AUTO}; parallelism.dense=at_sync; parallelism.sync.every_steps=6
    => parallelism.sync.every_steps accumulate_steps
checkpoint.warm_start={{}} => checkpoint.warm_start.path missing
checkpoint.warm_start={{path: x, tables: [users, movies]}}
    => checkpoint.warm_start.tables[1] - 'movies' is not in embedding_tables (users)
recovery.exchange_timeout_s=7; parallelism.shard_group_size=4
    => recovery.exchange_timeout_s no_effect together: there is one copy
parallelism.constraints={{users: {{}}}}
    => parallelism.constraints extra_forbidden embedding_tables[].constraints
parallelism.workers=5 => parallelism.workers not_divisible 4 or 6
parallelism.workers={{min: 6, max: 2}} => parallelism.workers bounds min (6) is above max (2)
parallelism.workers={{min: 3, max: 6}} => parallelism.workers.min not_divisible 2 or 4
parallelism.workers={{min: 2, max: 5}} => parallelism.workers.max not_divisible 4 or 6
parallelism.min_groups=3 => parallelism.min_groups min_groups wait for ever; raise workers
{AUTO}; parallelism.min_groups=5 => parallelism.min_groups min_groups set at most 4
parallelism.min_groups=2
    => parallelism.min_groups no_effect together: placement is intra_host; use inter_host, or
parallelism.min_groups=2; parallelism.placement=inter_host; parallelism.dense=every_step
    => parallelism.min_groups no_effect together: dense every_step averages
parallelism.moment_scale=3 => parallelism.moment_scale moment_scale
{AUTO}; parallelism.moment_scale=5 => parallelism.moment_scale moment_scale at most 4
optimizer.sparse.name=sgd; parallelism.moment_scale=2 => parallelism.moment_scale moment_scale
optimizer.sparse.name=sgd; parallelism.sync.optimizer_state=never
    => parallelism.sync.optimizer_state no_effect
parallelism.shard_group_size=1; parallelism.all_to_all.forward=bf16
    => parallelism.all_to_all no_effect
parallelism.sync.overlap=2 => parallelism.sync.overlap overlap every_steps (1)
parallelism.sync={{every_steps: 400, overlap: 400}}; parallelism.dense=at_sync
    => parallelism.sync.overlap overlap second moments
parallelism.workers=2000; parallelism.sync.overlap=true; parallelism.dense=at_sync
    => parallelism.sync.overlap overlap in 1 step
parallelism.sync={{every_steps: auto, overlap: 2}}
    => parallelism.sync.overlap overlap tuner.min_steps (1); set
parallelism.sync={{every_steps: auto, tuner: {{min_steps: 8, max_steps: 4}}}}
    => parallelism.sync.tuner bounds min_steps (8) is above max_steps (4)
parallelism.sync.every_steps=never => parallelism.sync.every_steps - 
{EVERY}; parallelism.dense=at_sync; parallelism.sync={{every_steps: auto, tuner: {{min_steps: 6}}}}
    => parallelism.sync.tuner.min_steps accumulate_steps
parallelism.placement=inter_host; parallelism.dense=every_step; parallelism.spares=1
    => parallelism.spares spares dense every_step averages
parallelism.shard_group_size=4; parallelism.sync.every_steps=auto
    => parallelism.sync single_replica one copy
parallelism.shard_group_size=4; parallelism.sync.every_steps=4
    => parallelism.sync single_replica 'sync' (`--set parallelism.sync=null`)
parallelism.shard_group_size=4; parallelism.dense=at_sync
    => parallelism.dense single_replica 'dense' (`--set parallelism.dense=auto`)
parallelism.shard_group_size=4; parallelism.divergence_check={{every_syncs: 2}}
    => parallelism.divergence_check single_replica one copy
parallelism.survive={{hosts: 2}} => parallelism.survive.hosts survive workers to 6, or lower it to 1
parallelism.shard_group_size=4; parallelism.survive={{hosts: 1}}
    => parallelism.survive.hosts survive 4 worker(s) make 1 of 4; raise workers to 8
parallelism.spares=1 => parallelism.spares spares placement is intra_host); remove
parallelism.placement=inter_host; parallelism.shard_group_size=4; parallelism.spares=1
    => parallelism.spares spares there is none; remove it
parallelism.placement=inter_host; parallelism.spares=3
    => parallelism.spares spares there are 2 groups, each on a host of its own
{AUTO}; parallelism.survive={{hosts: 4}} => parallelism.survive.hosts survive make 4 of 1
{SURVIVE}; parallelism.placement=intra_host => parallelism.placement survive inter_host
{SURVIVE}; parallelism.dense=every_step => parallelism.dense survive independent
{ROWS}=-1 => {ROWS} -
{MANY}20000 => {ROWS} table_too_large sharding group of 2 workers
{MANY}40000; {WAYS}=[table_wise] => {ROWS} table_too_large one worker
{MANY}10000; {AUTO} => {ROWS} table_too_large
{MANY}11000; {AUTO}; parallelism.survive={{hosts: 1}} => {ROWS} table_too_large
{MANY}60000; parallelism.sync={{mode: full, overlap: true}} => {ROWS} table_too_large
embedding_tables[0].embedding_dim=6 => embedding_tables[0].embedding_dim multiple_of
embedding_tables[0].data_type=bf16 => embedding_tables[0].data_type unsupported_data_type
embedding_tables[0].data_type=fp16; optimizer.sparse.weight_decay=0.01
    => embedding_tables[0].data_type weight_decay
embedding_tables[0].constraints.min_partition=6
    => embedding_tables[0].constraints.min_partition multiple_of
embedding_tables[0].constraints.min_partition=12
    => embedding_tables[0].constraints.min_partition min_partition
{WAYS}=[row_wise]; {ROWS}=3; parallelism.shard_group_size=4
    => {WAYS} unsupported_sharding some of 4 workers without any of the 3 rows
{WAYS}=[tw] => {WAYS}[0] -
optimizer.sparse.max_gradient=1.0; {WAYS}=[data_parallel] => {WAYS} max_gradient
features[0].type=sequence; embedding_tables[0].pooling=mean
    => embedding_tables[0].pooling no_effect
features[0].type=sequence; {WAYS}=[data_parallel] => {WAYS} unsupported_sharding EmbeddingColl
features[0].hashing={{num_buckets: 5}}; features[0].bucketize={{boundaries: [1, 2, 3]}}
    => features[0].bucketize several_encodings
features[0].hashing={{num_buckets: 1}} => features[0].hashing.num_buckets -
features[0].hashing={{num_buckets: 101}} => features[0].hashing.num_buckets vocabulary_too_large
features[0].hashing={{}}; {ROWS}=1 => features[0].hashing.num_buckets vocabulary_too_large 1 rows
{DYNAMIC}; embedding_tables[0].dynamic.input_hash_size=100; features[0].hashing={{num_buckets: 101}}
    => features[0].hashing.num_buckets vocabulary_too_large raise dynamic.input_hash_size
features[0].bucketize={{boundaries: [1, 1]}} => features[0].bucketize.boundaries not_ascending
features[0].bucketize={{boundaries: [1, 2, 3, 4]}}; {ROWS}=5
    => features[0].bucketize.boundaries vocabulary_too_large table 'users' has 5 rows
features[0].vocabulary={{path: /etc/passwd}} => features[0].vocabulary.path outside_data_path
features[0].vocabulary={{path: ../other}} => features[0].vocabulary.path outside_data_path
features[0].vocabulary={{path: "s3://b/v"}} => features[0].vocabulary.path outside_data_path
features[0].vocabulary={{path: v, column: c}} => features[0].vocabulary.column several_vocabularies
features[0].transform=log1p => features[0].transform unexpected_transform
features[0].missing=0 => features[0].missing unexpected_transform
features[1].hashing={{num_buckets: 5}} => features[1].hashing unexpected_encoding
features[1].mean=1.0 => features[1].mean no_effect
features[1].transform=log1p; features[1].std=1.0 => features[1].std no_effect
{DYNAMIC}; {ROWS}=auto => {ROWS} dynamic_size
{DYNAMIC}; {ROWS}=65 => {ROWS} dynamic_size
{DYNAMIC}; {ROWS}=16 => {ROWS} dynamic_size
{DYNAMIC}; {WAYS}=[table_wise] => {WAYS} unsupported_sharding
{DYNAMIC}; parallelism.workers=3; parallelism.shard_group_size=3
    => parallelism.shard_group_size dynamic_buckets
{DYNAMIC}; export.on_success=true => embedding_tables[0].dynamic not_exportable
export.shards=2 => export.shards not_exportable shards share one memory
sinks.tensorboard.dir=boards => sinks.tensorboard.dir - absolute path
{DYNAMIC}; parallelism.workers=4
    => parallelism.shard_group_size dynamic_copies whose kernel trains on CUDA only
{DYNAMIC}; parallelism.workers=4; parallelism.shard_group_size=auto
    => parallelism.shard_group_size dynamic_copies
{DYNAMIC}; parallelism.workers={{min: 2, max: 4}}; parallelism.shard_group_size=auto
    => parallelism.shard_group_size dynamic_copies
{DYNAMIC}; features[0].type=id_list; features[0].weights_column=w
    => features[0].weights_column dynamic_weights
{DYNAMIC}; embedding_tables[0].dynamic.eviction_interval=100000;
    resources.memory_bytes_per_worker=1048576 => {ROWS} table_too_large
"""


@pytest.mark.parametrize("fault", FAULTS.strip().replace("\n    ", " ").splitlines())
def test_a_fault_names_its_field(fault: str) -> None:
    changes, said = fault.split(" => ")
    path, code, *part = said.split(" ", 2)
    [(found, (found_code, message))] = refusal(changes).items()
    assert found == path
    assert code in ("-", found_code)
    assert not part or part[0] in message


def test_every_whole_number_of_a_spec_fits_64_bits() -> None:
    def without_bound(schema: Any, path: str) -> list[str]:
        if isinstance(schema, list):
            return [each for below in schema for each in without_bound(below, path)]
        if not isinstance(schema, dict):
            return []
        is_bounded = "maximum" in schema or "exclusiveMaximum" in schema
        found = [path] if schema.get("type") == "integer" and not is_bounded else []
        for name, below in schema.items():
            found += without_bound(below, f"{path}.{name}")
        return found

    assert without_bound(json_schema(), "") == []


def test_what_was_stored_before_bounds_were_set_stays_readable() -> None:
    bounded = [
        "parallelism.workers={min: 4, max: 1000000}",
        "parallelism.sync.every_steps=100000000000000000000",
        "training.max_steps=100000000000000000000",
        "recovery.min_hang_s=1e12",
        "resources.cpus_per_worker=0.00001",
        "embedding_tables[0].constraints.pooling_factor=2e6",
    ]
    refused = [
        *bounded,
        "embedding_tables[0].dynamic.input_hash_size=1",
        "sinks.tensorboard.dir=s3://bucket/tb",
        "parallelism.min_groups=3",
        'checkpoint.path="s3://[x"',
        'data.path="/data/ml\\n"',
    ]
    for change in refused:
        codes = {code for code, _ in refusal(change).values()}
        assert codes == {"bounds"} or change not in bounded, change
        # Dynamic tables need one copy of all, and syncs several.
        group = f"parallelism.shard_group_size={4 if 'dynamic' in change else 2}"
        document = apply_overrides(spec_document(), [change, group])
        stored = JobSpec.model_validate(document, context={"stored": True})
        assert JobSpec.checked(stored.with_workers(4).model_dump(), {"stored": True}), change
    assert stored.data.path == "/data/ml\n"


def test_tables_that_just_fit_are_accepted() -> None:
    assert changed(f"{MANY}22000").table_bytes == 36_000
    assert changed(f"{MANY}11000; {AUTO}").table_bytes == 36_000
    # What may be in host memory is for the planner to say.
    assert changed(f"{MANY}1; {CACHED}").may_cache
    on_gpus = "parallelism.planner.compute_kernel=auto; resources.device=cuda"
    assert changed(f"{MANY}1; {on_gpus}; {LIMITS}.cache_load_factor=0.5").may_cache
    assert not changed(on_gpus, "resources.device=cpu").may_cache


def test_a_dynamic_table_of_one_worker_needs_no_group_size() -> None:
    one = "parallelism.workers=1; parallelism.shard_group_size=auto"
    assert changed(f"{DYNAMIC}; {one}").dynamic_tables


def test_text_that_no_answer_could_carry_is_refused() -> None:
    for document in (
        spec_document() | {"labels": {"team": "\ud800"}},
        spec_document() | {"\ud800": 1},
        spec_document() | {"features": [{"name": "u", "type": "id", "table": "\ud800"}]},
        with_options({"city": "\ud800"}),
    ):
        with pytest.raises(SpecError) as caught:
            validate_spec(document)
        for problem in caught.value.problems:
            f"{problem.path} {problem.message}".encode()


def with_options(options: dict[str, object]) -> dict[str, object]:
    model = spec_document()["model"] | {"module": "mine:Model", "options": options}
    return spec_document() | {"model": model}


def test_a_spec_that_would_fill_the_store_is_refused() -> None:
    assert validate_spec(with_options({"cities": ["x" * 1000] * 1000}))
    features = [{"name": f"f{n}", "type": "id", "table": "users"} for n in range(12_000)]
    spec = validate_spec(spec_document() | {"features": spec_document()["features"] + features})
    assert validate_spec(spec.model_dump(mode="json")) == spec, "with its defaults written out"
    with pytest.raises(SpecError, match=r"more than the 2097152 of any spec.*model\.options"):
        validate_spec(with_options({"cities": ["x" * 1000] * 2100}))


def test_all_faults_are_reported_at_once() -> None:
    problems = refusal("name=BAD", "data.batch_size=0", "parallelism.constraints={users: {}}")
    assert set(problems) == {"name", "data.batch_size", "parallelism.constraints"}


def test_a_syntax_error_names_line_and_column() -> None:
    for text, place, message in (
        ("name: x\ndata: [", "line 2", "expected"),
        ("name: x\ndata: {}\nname: y", "line 3, column 1", "'name' stands twice"),
    ):
        with pytest.raises(SpecError, match=message) as caught:
            load_spec(text)
        assert caught.value.problems[0].path.startswith(place)


def test_overrides_reach_lists_and_make_missing_sections() -> None:
    changes = ["embedding_tables[0].num_embeddings=99", "training.max_steps=7"]
    # A section of which a file has the name alone is missing, too.
    document = spec_document() | {"training": None}
    spec = validate_spec(apply_overrides(document, changes))
    assert document == spec_document() | {"training": None}
    assert spec.embedding_tables[0].num_embeddings == 99
    assert spec.training.max_steps == 7


@pytest.mark.parametrize(
    "path",
    ["name[0]", "features[" + "9" * 5000 + "]", "name=2001 #", "a..b", "", "features.x", "b["],
)
def test_a_path_that_leads_nowhere_sets_nothing(path: str) -> None:
    with pytest.raises(SpecError) as caught:
        set_values(spec_document(), {path: "x"})
    [problem] = caught.value.problems
    assert problem.code == "override"
    assert len(problem.path) < 600


def test_an_override_that_cannot_be_set_says_so() -> None:
    for override in ("no-equals-sign", "features[9].name=x", "=3"):
        with pytest.raises(SpecError) as caught:
            apply_overrides(spec_document(), [override])
        assert caught.value.problems[0].code == "override"


def test_values_are_set_as_they_are_and_never_read_as_yaml() -> None:
    text = "{<<: [*a, *a]}"
    changed = set_values(spec_document(), {"name": text, "embedding_tables[0].num_embeddings": 99})
    assert changed["name"] == text
    assert changed["embedding_tables"][0]["num_embeddings"] == 99


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_what_would_fill_stack_or_memory_is_refused() -> None:
    lists, maps = ["- &a0 [1, 2]"], ["- &a0 {x: 1}"]
    for number in range(29):
        before = f"*a{number}, *a{number}, *a{number}"
        lists.append(f"- &a{number + 1} [{before}]")
        maps.append(f"- &a{number + 1} {{<<: [{before}]}}")
    aliases = ["\n".join(lists), "\n".join(maps), "&a [*a]", "x" * 2_000_000]
    for text in ("[" * 900, "[" * 100_000, "{a: " * 900, *aliases):
        with pytest.raises(SpecError):
            parse_document(text)
    parsed = parse_document("a: &x {b: 1}\nc: {<<: *x, b: 2}\nd: *x")
    assert (parsed["c"], parsed["d"]) == ({"b": 2}, {"b": 1})
    for depth in (900, 5000):
        with pytest.raises(SpecError, match="nested"):
            set_values(spec_document(), {"labels.a": nested(depth)})
    assert validate_spec(with_options({"a": nested(20)}))
    with pytest.raises(SpecError, match="nested deeper"):
        validate_spec(with_options({"a": nested(40)}))


def test_of_very_many_faults_some_are_told_soon() -> None:
    with pytest.raises(SpecError) as caught:
        validate_spec({**spec_document(), "features": [1] * 100_000})
    assert len(caught.value.problems) <= 200


def test_a_date_stays_a_text_and_a_wrong_number_is_a_fault() -> None:
    assert apply_overrides(spec_document(), ["name=2001-99-99"])["name"] == "2001-99-99"
    for text in ("!!timestamp 2001-99-99", "!!timestamp x", "!!bool maybe", "!!int ''"):
        tag = text.split()[0]
        with pytest.raises(SpecError, match=f"line 2, column 6: .* cannot be read as {tag}"):
            parse_document(f"a: 1\nb: [ {text} ]")
    with pytest.raises(SpecError, match="a value is wrong"):
        parse_document(r'"\UFFFFFFFF"')


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*spec_document(), "x"]), inner, max_size=4)
        ),
    )
)
def test_any_document_is_accepted_or_refused_with_paths(document: Any) -> None:
    with pytest.raises(SpecError) as caught:
        validate_spec(document)
    assert all(problem.path and problem.message for problem in caught.value.problems)


def test_the_moment_scale_is_m_where_moments_grow() -> None:
    for name in get_args(SparseOptimizerName):
        scale = 2 if "adagrad" in name else 1
        assert changed(f"optimizer.sparse.name={name}").moment_scale == scale


def test_a_table_named_like_an_attribute_of_its_module_is_refused_unless_it_is_stored() -> None:
    for name in ("items", "type", "_modules", "_"):
        changes = [f"embedding_tables[0].name={name}", f"features[0].table={name}"]
        assert refusal(*changes)["embedding_tables[0].name"][0] == "reserved_name"
        document = apply_overrides(spec_document(), changes)
        stored = JobSpec.model_validate(document, context={"stored": True})
        assert stored.embedding_tables[0].name == name


def test_the_reserved_names_are_those_of_the_installed_torch() -> None:
    from torch import nn

    assert {n for n in dir(nn.ModuleDict()) if not n.startswith("_")} == MODULE_ATTRIBUTES


def test_a_table_is_looked_up_pooled_or_in_sequence_but_not_both() -> None:
    document = spec_document()
    document["features"].append({"name": "clicks", "type": "sequence", "table": "users"})
    spec = validate_spec(document)
    # An id that shares the table of a sequence is a sequence of one.
    assert [f.name for f in spec.sequence_features] == ["user_id", "clicks"]
    assert [f.length_limit for f in spec.sequence_features] == [1, 50]
    assert spec.pooled_features == ()
    document["features"].append({"name": "seen", "type": "id_list", "table": "users"})
    with pytest.raises(SpecError) as caught:
        validate_spec(document)
    assert [p.code for p in caught.value.problems] == ["shared_table"]


def sync(settings: str) -> list[str]:
    return [f"parallelism.sync={{{settings}}}"]


INTRA, INTER = (f"parallelism.placement={where}_host" for where in ("intra", "inter"))
CHANGES_OVERLAP = "parallelism.sync={dtype: bf16, overlap: true}"


@pytest.mark.parametrize(
    ("changes", "num_bytes"),
    [
        # Four workers look up 4 x 25 of 1000 rows in a step.
        (sync("mode: touched_rows"), 1000),
        (sync("mode: touched_rows, overlap: true, every_steps: 3"), 2 * 300 * 36 + 1000),
        (sync("mode: touched_rows, overlap: true, every_steps: 6"), 2 * 36_000 + 1000),
        (sync("mode: touched_rows, dtype: bf16"), 2 * 100 * 36 + 1000 * 5),
        (sync("overlap: true, dtype: bf16, every_steps: 50"), 4 * 36_000 + 1000 * 5),
        (sync("mode: touched_rows, optimizer_state: delayed"), 2 * 100 * 4 + 1000),
        (sync("mode: touched_rows, optimizer_state: never"), 1000 * 2),
        (sync("mode: full, dtype: bf16"), 36_000),
        (sync("every_steps: auto, overlap: true, tuner: {max_steps: 3}"), 2 * 200 * 36 + 1000),
        (sync("every_steps: auto, overlap: true, tuner: {max_steps: 8}"), 2 * 36_000 + 1000),
        (sync("mode: full, overlap: true"), 2 * 36_000),
        (sync("mode: full, overlap: true, dtype: fp16"), 3 * 36_000),
        # Groups that are failure domains hold the means until all have voted,
        ([INTER], 100 * 36 + 1000 * 2),
        # a base that a failed round falls back on,
        ([INTRA, CHANGES_OVERLAP], 4 * 100 * 36 + 1000 * 5),
        ([INTER, CHANGES_OVERLAP], 5 * 100 * 36 + 1000 * 10),
        # and all state where it is averaged before saves.
        ([INTER, "parallelism.sync.optimizer_state=never"], 100 * 32 + 1000 * (4 + 2)),
        # One copy is never synced. Weight decay makes a sync full.
        (["parallelism.shard_group_size=4"], 0),
        (["parallelism.sync.overlap=true", "optimizer.sparse.weight_decay=0.1"], 2 * 36_000),
    ],
)
def test_a_sync_holds_what_its_mode_and_failure_domain_need(
    changes: list[str], num_bytes: int
) -> None:
    spec = changed(f"{ROWS}=1000", "data.batch_size=25", *changes)
    assert (spec.parallelism.failure_domain == "replica_group") is (INTER in changes)
    assert spec.sync_bytes(spec.embedding_tables[0]) == num_bytes


def spec_with(**model: Any) -> dict[str, Any]:
    return spec_document() | {"model": {"tasks": [{"name": "rating", "loss": "mse"}], **model}}


def test_a_module_needs_no_layers_of_ours() -> None:
    spec = validate_spec(spec_with(module="towers.two:Towers", code="ab" * 32))
    assert spec.model.module == "towers.two:Towers"
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(SpecError) as caught:
        validate_spec(spec_with())
    paths = {problem.path: problem.code for problem in caught.value.problems}
    assert paths == {"model.dense_arch": "missing", "model.over_arch": "missing"}


def test_a_copy_with_other_features_counts_their_lookups() -> None:
    spec = validate_spec(spec_document())
    (table,), (user, age) = spec.embedding_tables, spec.features
    once = spec.lookups_per_step(table)
    twice = spec.model_copy(
        update={"features": (user, user.model_copy(update={"name": "friend"}), age)}
    )
    assert twice.lookups_per_step(table) == 2 * once
    assert spec.lookups_per_step(table) == once
