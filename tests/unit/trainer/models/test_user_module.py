"""Networks of the user's own: held to their contract, their errors told by their own lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import REPO
from tests.harness.small_model import plain_batch
from tests.unit.trainer.models.test_recommender import CPU, POOLED, jagged, make_batch, make_spec
from trainer.data.batches import Batch
from trainer.failures import EndReason, UserCodeError, WorkerFailure
from trainer.models.networks import build_model
from trainer.models.user_module import UserRecommender, load_class
from trainer.spec import load_spec
from trainer.spec.job import JobSpec
from trainer.spec.model import TaskSpec
from trainer.spec.tables import DynamicSpec
from trainer.training.worker import named_failures

EXAMPLES = REPO / "examples"
TASK = TaskSpec(name="rating", loss="mse")
Write = Callable[[str, str], None]

SOURCE = """
from torch import nn
from trainer.models.sparse import SparseArch

class Net(nn.Module):
    def __init__(self, spec, device):
        super().__init__()
        self.sparse = SparseArch(spec, device)
        self.scale = nn.Linear(1, 1, device=device)

    def forward(self, batch):
        vectors = self.sparse(batch.sparse, batch.sequences)
        outputs = self.scale(vectors.mean(dim=(1, 2)).unsqueeze(1))
        errors = (outputs - batch.label) ** 2
        return {"rating": errors.mean()}, outputs
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a file of user code that can be imported for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def _write(name: str, source: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    yield _write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and name.startswith("own_"):
            del sys.modules[name]


def spec_of(
    module: str,
    features: list[dict[str, Any]] = POOLED[:2],
    code: bool = False,
    data_type: str = "fp32",
) -> JobSpec:
    spec = make_spec(features, data_type=data_type)
    model = spec.model.model_copy(
        update={"module": module, "code": "ab" * 32 if code else None, "tasks": (TASK,)}
    )
    return spec.model_copy(update={"model": model})


def filled(model: nn.Module) -> nn.Module:
    """The model with tables that exist, as sharding would make them."""
    for module in model.modules():
        if type(module).__name__ == "EmbeddingBagCollection":
            module.to_empty(device=CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


def answering(forward: Callable[[], Any], tasks: tuple[TaskSpec, ...] = (TASK,)) -> Any:
    """What a user's network whose forward is `forward` gives for a batch."""

    class Own(nn.Module):
        def forward(self, batch: Any) -> Any:
            return forward()

    return UserRecommender(Own(), "own:Own", tasks)(make_batch(make_spec(POOLED[:1])))


def raising(error: BaseException) -> Any:
    raise error


LOSS = torch.ones((), requires_grad=True)


def test_losses_count_by_the_weights_of_their_tasks() -> None:
    tasks = (TaskSpec(name="clicks", loss="bce", weight=0.25),)
    losses = {"clicks": 2 * LOSS, "other": LOSS}
    loss, _ = answering(lambda: (losses, torch.zeros(3, 1)), tasks)
    assert loss.item() == pytest.approx(0.25 * 2 + 1)


def test_a_batch_without_a_row_that_counts_has_a_loss_and_gradients_of_0() -> None:
    class Own(nn.Module):
        def forward(self, batch: Batch) -> Any:
            outputs = scale * torch.arange(1.0, 4.0)
            return (outputs * batch.weight).sum() / batch.weight.sum(), outputs

    scale = nn.Parameter(torch.ones(()))
    model = UserRecommender(Own(), "own:Own", (TASK,))
    for weights, mean in ([0.0, 0.0, 0.0], 0.0), ([0.0, 0.25, 0.25], 2.5):
        scale.grad = None
        loss, _ = model(replace(make_batch(make_spec(POOLED[:1])), weight=torch.tensor(weights)))
        loss.backward()
        assert (loss.item(), scale.grad.item()) == (mean, mean)


def test_predictions_that_are_kept_until_a_report_hold_no_memory_of_the_network() -> None:
    activations = torch.zeros(3, 1000)
    _, outputs = answering(lambda: (LOSS, activations[:, :1]))
    activations.fill_(1)
    assert not outputs.any()
    assert outputs.untyped_storage().nbytes() == 12


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (LOSS, "must return (losses, predictions), not a tensor []"),
        ((LOSS, torch.zeros(3, 2)), "one column for each of model.tasks; got a tensor [3, 2]"),
        ((LOSS, [1.0]), "got list"),
        ((torch.ones(3, requires_grad=True), torch.zeros(3, 1)), "one number, not a tensor [3]"),
        (({"rating": 0.5}, torch.zeros(3, 1)), "loss 'rating' must be a tensor"),
        (({}, torch.zeros(3, 1)), "losses is empty"),
        ((LOSS.bfloat16(), torch.zeros(3, 1)), "the loss is torch.bfloat16"),
        ((torch.ones(()), torch.zeros(3, 1)), "depends on no parameter"),
    ],
)
def test_an_answer_that_breaks_the_contract_says_what_was_expected(answer: Any, said: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        answering(lambda: answer)
    assert said in str(caught.value)


def test_parameters_and_buffers_that_are_views_get_memory_of_their_own(write: Write) -> None:
    views = "torch.ones(1, 3).expand(4, 3)", "torch.ones(4, 8)[:, :3]", "torch.ones(3, 4).t()"
    lines = [f"self.register_buffer('own_{i}', {view})" for i, view in enumerate(views)]
    lines += [f"self.own_{i} = torch.nn.Parameter({view})" for i, view in enumerate(views, 3)]
    built = "\n        ".join(["super().__init__()", "import torch", *lines])
    write("own_views.py", SOURCE.replace("super().__init__()", built))
    network = build_model(spec_of("own_views:Net"), CPU).network
    for tensor in (getattr(network, f"own_{index}") for index in range(2 * len(views))):
        assert tensor.is_contiguous() and torch.equal(tensor, torch.ones(4, 3))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_an_error_in_the_users_code_is_shown_by_its_own_lines_alone(write: Write) -> None:
    write(
        "own_b.py",
        SOURCE.replace("errors =", "deeper(batch)\n        errors =")
        + ("\ndef deeper(batch):\n    return nn.Linear(2, 3)(batch.dense)\n"),
    )
    spec = spec_of("own_b:Net")
    model = filled(build_model(spec, CPU))
    with pytest.raises(WorkerFailure) as caught, named_failures():
        model(make_batch(spec))
    failure = caught.value
    assert failure.reason == EndReason.USER_CODE
    assert 'at "own_b.py", line 19, in deeper' in failure.message
    told = failure.evidence["traceback"].splitlines()
    assert told[0] == '  File "own_b.py", line 14, in forward'
    assert told[2] == '  File "own_b.py", line 19, in deeper'
    assert told[3] == "    return nn.Linear(2, 3)(batch.dense)"
    assert told[-1].startswith("RuntimeError: mat1 and mat2")
    assert "torch/nn" not in failure.evidence["traceback"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import missing_library_x\n", "No module named 'missing_library_x'"),
        ("def broken(:\n", "SyntaxError"),
        ("x = 1\n", "has no 'Net'"),
        ("raise ValueError('not today')\n", "ValueError: not today"),
        ("raise ValueError('x' * 100_000 + '\\n' + 'y' * 100_000)\n", "ValueError: x"),
        ("def Net(spec, device):\n    return 1\n", "must give a torch.nn.Module"),
        ("def Net(spec):\n    return 1\n", "TypeError"),
        ("import sys\nsys.exit(2)\n", 'SystemExit: 2 (at "own_c.py", line 2'),
    ],
)
def test_code_that_cannot_be_built_is_the_users_failure(
    write: Write, source: str, said: str
) -> None:
    write("own_c.py", source)
    with pytest.raises(UserCodeError) as caught:
        build_model(spec_of("own_c:Net"), CPU)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert sum(map(len, caught.value.lines)) < 2000
    sys.modules.pop("own_c", None)


def test_a_module_that_is_nowhere_says_how_to_ship_it() -> None:
    with pytest.raises(UserCodeError, match="ship it with --code DIR"):
        load_class("own_nowhere.net:Net")
    with pytest.raises(UserCodeError, match="the folder given with --code must hold it"):
        load_class("own_nowhere.net:Net", is_shipped=True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "Connection refused"), EndReason.USER_CODE),
        (FileNotFoundError(2, "No such file"), EndReason.USER_CODE),
        (RuntimeError("timed out waiting for my feature server"), EndReason.USER_CODE),
        (SystemExit(2), EndReason.USER_CODE),
        (RuntimeError("[c10d] Timed out waiting for 2 ranks"), EndReason.WORKERS_LOST),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), EndReason.WORKERS_LOST),
        (RuntimeError("CUDA error: uncorrectable ECC error"), EndReason.WORKERS_LOST),
        (MemoryError("std::bad_alloc"), EndReason.HOST_OOM),
    ],
)
def test_the_users_own_connections_and_exits_are_no_loss_of_a_peer(
    error: BaseException, reason: str
) -> None:
    with pytest.raises(WorkerFailure) as caught, named_failures("own:Own"):
        answering(lambda: raising(error))
    assert caught.value.reason == reason


def test_a_collective_that_ends_below_the_users_forward_is_a_lost_peer() -> None:
    # Words without a name, raised where PyTorch's own code ends.
    source = "def raising():\n    raise RuntimeError('Broken pipe')\n"
    names: dict[str, Any] = {}
    exec(compile(source, torch.__file__, "exec"), names)
    with pytest.raises(WorkerFailure) as caught, named_failures("own:Own"):
        answering(names["raising"])
    assert caught.value.reason == EndReason.WORKERS_LOST


@pytest.mark.parametrize("name", ["own_j", "own_without_init.net"])
def test_a_bug_in_the_users_backward_is_shown_by_its_own_lines(write: Write, name: str) -> None:
    file, module = f"{name.replace('.', '/')}.py", f"{name}:Net"
    write(
        file,
        "import torch\n\nclass Twice(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n"
        "    @staticmethod\n    def backward(ctx, grad):\n        return {}['gamma']\n"
        "\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, batch):\n"
        "        return Twice.apply(self.weight).sum(), torch.zeros(3, 1)\n",
    )
    model = UserRecommender(load_class(module)(), module, (TASK,))
    loss, _ = model(make_batch(make_spec(POOLED[:1])))
    with pytest.raises(WorkerFailure) as caught, named_failures(module):
        loss.backward()
    assert caught.value.reason == EndReason.USER_CODE
    assert f"KeyError: 'gamma' (at \"{file}\", line 9, in backward)" in caught.value.message
    with pytest.raises(WorkerFailure) as caught, named_failures(module):
        raise OSError("No space left on device")
    assert caught.value.reason == EndReason.STORAGE_ERROR


BAGS = """
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

def bags(spec, pooling=PoolingType.SUM):
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=[f.name for f in spec.features if f.table == table.name],
            pooling=pooling,
        )
        for table in spec.embedding_tables
    ]
    return EmbeddingBagCollection(configs, is_weighted=True, device=torch.device("meta"))

class Net(nn.Module):
    def __init__(self, spec, device):
        super().__init__()
        self.bags = bags(spec)

class Twice(Net):
    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.more = bags(spec)

class Without(nn.Module):
    def __init__(self, spec, device):
        super().__init__()

class Alias(Net):
    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.layers = nn.ModuleList([self.bags])

class Lazy(Net):
    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.out = nn.LazyLinear(1)

class Sparse(Net):
    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.words = nn.Embedding(3, 4, sparse=True)

class Frozen(Net):
    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.bags.requires_grad_(False)

class Mean(nn.Module):
    def __init__(self, spec, device):
        super().__init__()
        self.bags = bags(spec, PoolingType.MEAN)

class Short(Net):
    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.register_buffer("ages", torch.zeros(3, dtype=torch.int16))

class Complex(Net):
    def __init__(self, spec, device):
        super().__init__(spec, device)
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
"""


def with_dynamic_ids(spec: JobSpec) -> JobSpec:
    tables = tuple(
        table.model_copy(update={"num_embeddings": 64, "dynamic": DynamicSpec(num_buckets=4)})
        for table in spec.embedding_tables
    )
    return spec.model_copy(update={"embedding_tables": tables})


def test_tables_that_differ_from_the_spec_are_named(write: Write) -> None:
    write("own_f.py", BAGS)
    build_model(spec_of("own_f:Net"), CPU)
    for module in ("Twice", "Alias"):
        with pytest.raises(
            UserCodeError, match=r"missing: none, unknown: \[\('tags', 11, 4, 'fp32'\), "
        ):
            build_model(spec_of(f"own_f:{module}"), CPU)
    missing = r"missing: \[\('tags', 11, 4, 'fp16'\), \('users', 11, 4, 'fp16'\)\], unknown: "
    for module, unknown in (("Without", "none"), ("Net", r"\[\('tags', 11, 4, 'fp32'\)")):
        with pytest.raises(UserCodeError, match=missing + unknown):
            build_model(spec_of(f"own_f:{module}", data_type="fp16"), CPU)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("Lazy", "out.weight gets its size from the first batch"),
        ("Sparse", "words has sparse gradients"),
        ("Frozen", "tables in bags learn whatever requires_grad says"),
        ("Mean", "means of weighted ids in bags have wrong gradients on CPUs"),
        ("Short", "ages is torch.int16, which ranks cannot exchange"),
        ("Complex", "phase is torch.complex64, which optimizer.dense.name adam does not train"),
    ],
)
def test_parts_that_ranks_cannot_exchange_or_train_are_named_as_the_network_is_built(
    write: Write, module: str, said: str
) -> None:
    write("own_i.py", BAGS)
    with pytest.raises(UserCodeError, match=said):
        build_model(spec_of(f"own_i:{module}"), CPU)


def test_a_dynamic_table_in_a_plain_collection_is_refused(write: Write) -> None:
    write("own_g.py", BAGS)
    with pytest.raises(UserCodeError, match=r"'tags', 'users' \(dynamic\) must lie in"):
        build_model(with_dynamic_ids(spec_of("own_g:Net")), CPU)
    write("own_h.py", SOURCE)
    build_model(with_dynamic_ids(spec_of("own_h:Net")), CPU)


def test_the_shipped_example_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "code")
    overrides = [f"embedding_tables[{i}].num_embeddings=11" for i in range(6)]
    spec = load_spec((EXAMPLES / "movielens-module.yaml").read_text(), overrides)
    model = filled(build_model(spec, CPU))
    sparse = jagged({feature.name: [[], [], []] for feature in spec.pooled_features})
    dense = torch.rand(3, len(spec.dense_features))
    batch = plain_batch(dense, sparse, torch.tensor([[1.0], [2.0], [3.0]]))
    loss, outputs = model(replace(batch, weight=torch.tensor([0.2, 0.0, 0.2])))
    assert loss.item() == pytest.approx(((outputs - batch.label)[[0, 2]] ** 2).mean().item())
    loss.backward()
    assert outputs.shape == (3, 1)
    assert not outputs.requires_grad
    assert model.network.movie_tower[0].weight.grad is not None
