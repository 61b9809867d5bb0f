"""Arch `movielens`: what the history does to a prediction, and what it must never do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.builders import spec_document
from tests.harness.small_model import plain_batch
from tests.unit.trainer.models.test_recommender import CPU, Lists, jagged, make_model
from trainer.data.batches import Batch
from trainer.models.networks import HistoryEncoder
from trainer.models.sparse import History
from trainer.spec import validate_spec
from trainer.spec.model import TransformerSpec

DIM, MAX_LENGTH, NUM_ROWS = 8, 4, 12


def document(**model: Any) -> dict[str, Any]:
    """A small job whose candidate and history share the table `movies`."""
    history = {"name": "history", "type": "sequence", "table": "movies", "max_length": MAX_LENGTH}
    return spec_document() | {
        "features": [
            {"name": "user", "type": "id", "table": "users"},
            {"name": "movie", "type": "id", "table": "movies"},
            {"name": "genres", "type": "id_list", "table": "genres"},
            history | {"weights_column": "ratings"},
            {"name": "year", "type": "dense"},
        ],
        "embedding_tables": [
            {"name": name, "embedding_dim": DIM, "num_embeddings": NUM_ROWS}
            for name in ("users", "movies", "genres")
        ],
        "model": {
            "arch": "movielens",
            "transformer": {"sequence": "history", "candidate": "movie", "dropout": 0.0},
            "dense_arch": {"layer_sizes": [DIM]},
            "interaction_arch": {"num_layers": 2, "low_rank_dim": 4},
            "over_arch": {"layer_sizes": [6, 1]},
            "tasks": [{"loss": "mse"}],
            **model,
        },
        "parallelism": {"shard_group_size": 1},
    }


SPEC = validate_spec(document())


def make_batch(histories: Lists, ratings: list[list[float]], genres: Lists) -> Batch:
    """A batch whose row r is user r and movie r + 1."""
    count = len(histories)
    ids = torch.arange(count)
    return plain_batch(
        dense=torch.linspace(-1, 1, count)[:, None],
        sparse=jagged({"user": ids[:, None].tolist(), "genres": genres}),
        label=torch.ones(count, 1),
        sequences=jagged(
            {"movie": (ids + 1)[:, None].tolist(), "history": histories},
            [1.0] * count + [rating for row in ratings for rating in row],
        ),
    )


def predict(histories: Lists, ratings: list[list[float]]) -> Any:
    """Predictions of one fixed model, [B]."""
    model = make_model(SPEC).eval()
    with torch.no_grad():
        _, outputs = model(make_batch(histories, ratings, [[3]] * len(histories)))
    return outputs[:, 0]


def test_empty_histories_and_empty_bags_train_with_finite_numbers() -> None:
    model = make_model(SPEC)
    loss, outputs = model(make_batch([[], [], []], [[], [], []], [[], [], []]))
    loss.backward()
    assert outputs.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_row_is_predicted_alike_whatever_shares_its_batch() -> None:
    histories = [[2, 5, 9], [], [4], [1, 1, 8, 3]]
    ratings = [[1.0, -0.5, 0.0], [], [2.0], [-1.0, 0.5, 0.25, 1.0]]
    together = predict(histories, ratings)
    model = make_model(SPEC).eval()
    for row in range(len(histories)):
        others = [histories[row] if place == row else [7, 7] for place in range(4)]
        their_ratings = [ratings[row] if place == row else [9.0, -9.0] for place in range(4)]
        with torch.no_grad():
            _, outputs = model(make_batch(others, their_ratings, [[3]] * 4))
        torch.testing.assert_close(outputs[row, 0], together[row], atol=1e-5, rtol=1e-5)


def test_what_was_rated_how_and_when_all_matter() -> None:
    base = predict([[2, 5, 9]], [[1.0, -0.5, 0.5]])
    other_movie = predict([[2, 5, 10]], [[1.0, -0.5, 0.5]])
    other_rating = predict([[2, 5, 9]], [[1.0, -0.5, -0.5]])
    other_order = predict([[5, 2, 9]], [[-0.5, 1.0, 0.5]])
    for changed in (other_movie, other_rating, other_order):
        assert (changed - base).abs().item() > 1e-4


def test_the_candidate_and_the_history_learn_in_one_table() -> None:
    model = make_model(SPEC)
    loss, _ = model(make_batch([[9]], [[1.0]], [[]]))
    loss.backward()
    tables = model.network.sparse_arch.embedding_collection.embeddings
    assert list(tables) == ["movies"]
    changed = tables["movies"].weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert changed == [1, 9]


@given(
    lengths=st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=4),
    padding=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False),
)
def test_padding_never_reaches_the_result(lengths: list[int], padding: float) -> None:
    torch.manual_seed(sum(lengths))
    spec = TransformerSpec(sequence="history", candidate="movie", dropout=0.0)
    encoder = HistoryEncoder(spec, DIM, MAX_LENGTH, CPU).eval()
    vectors = torch.randn(len(lengths), MAX_LENGTH, DIM)
    ratings = torch.randn(len(lengths), MAX_LENGTH)
    candidate = torch.randn(len(lengths), DIM)
    spoilt_vectors, spoilt_ratings = vectors.clone(), ratings.clone()
    for row, length in enumerate(lengths):
        spoilt_vectors[row, length:] = padding
        spoilt_ratings[row, length:] = padding
    count = torch.tensor(lengths)
    with torch.no_grad():
        clean = encoder(History(vectors, count, ratings), candidate)
        spoilt = encoder(History(spoilt_vectors, count, spoilt_ratings), candidate)
    assert torch.equal(clean, spoilt)
    assert clean.isfinite().all()
    assert not clean[count == 0, 1].any(), "an empty history adds nothing"


def test_the_most_recent_movie_has_the_first_position_however_long_the_history() -> None:
    history = History(torch.zeros(3, 4, DIM), torch.tensor([4, 2, 0]), torch.zeros(3, 4))
    assert history.recency.tolist() == [[3, 2, 1, 0], [1, 0, 3, 3], [3, 3, 3, 3]]
    assert history.is_padding.sum(1).tolist() == [0, 2, 4]


def test_several_tasks_add_up_by_their_weights() -> None:
    tasks = [
        {"name": "stars", "loss": "mse", "weight": 2.0},
        {"name": "liked", "loss": "bce", "weight": 0.5, "label": {"column": "liked"}},
    ]
    spec = validate_spec(document(tasks=tasks, over_arch={"layer_sizes": [6, 2]}))
    batch = make_batch([[1], []], [[1.0], []], [[], [2]])
    labels = torch.tensor([[0.5, 1.0], [-1.0, 0.0]])
    batch = Batch(**{**vars(batch), "label": labels, "weight": torch.tensor([3.0, 1.0])})
    loss, outputs = make_model(spec)(batch)
    squares = (outputs[:, 0] - labels[:, 0]).square()
    crosses = torch.nn.functional.softplus(outputs[:, 1]) - labels[:, 1] * outputs[:, 1]
    rows = 2.0 * squares + 0.5 * crosses
    assert loss.item() == pytest.approx(((3 * rows[0] + rows[1]) / 4).item(), rel=1e-5)
