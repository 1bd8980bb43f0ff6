"""Parts of towers against loops over ids, their errors, and towers that are made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.data.features import Features
from sparring.data.histories import Before, Histories
from sparring.models.histories import HistoryTower
from sparring.models.parts import (
    Categories,
    Concat,
    Dense,
    DescribedHistory,
    FeatureTower,
    Perceptron,
    Sum,
    Tags,
)
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower

GENRES = [["b", "a", "b"], [], None, ["a"], ["c", "zz", ""], ["b", "a", "c"]]
TABLE = pl.DataFrame(
    {
        "colour": ["red", None, "blue", "red", "", "blue"],
        "size": [1, 2, 1, 1, 2, 1],
        "genres": GENRES,
        "price": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    }
)
COLUMNS = ["colour", "size", "genres", "price"]


def some_features() -> Features:
    return Features.from_table(TABLE, COLUMNS)


def rows(tower: nn.Module, ids: list[int]) -> list[Tensor]:
    return [tower(torch.tensor(i)) for i in ids]


def test_categories_have_a_vector_per_column_and_code() -> None:
    """Column k of id i contributes row offset_k + code of the table; any shape of ids works, a scalar too."""
    features = some_features()
    part = Categories(features.categorical, features.cardinalities, 4)
    ids = torch.tensor([[0, 5], [4, 4]])
    got = part(ids)
    assert got.shape == (2, 2, 8)
    for i, vector in zip(ids.flatten().tolist(), got.reshape(-1, 8), strict=True):
        first, second = features.categorical[i].tolist()
        want = torch.cat([part.values.weight[first], part.values.weight[features.cardinalities[0] + second]])
        assert torch.equal(vector, want)
    assert part(torch.tensor(1)).shape == (8,)


def test_tags_are_the_mean_of_their_values() -> None:
    """Each distinct known value counts once; an id without one has the vector of code 0."""
    part = Tags(some_features().tags[0], 4)
    order = {"a": 1, "b": 2, "c": 3, "zz": 4}  # by frequency, then by name: a and b 3 times, c twice
    assert part.values.n == 5
    for i, values in enumerate(GENRES):
        known = sorted({order[value] for value in values or [] if value}) or [0]
        want = torch.stack([part.values.weight[code] for code in known]).mean(0)
        torch.testing.assert_close(part(torch.tensor(i)), want)
    part(torch.tensor([3, 1])).sum().backward()
    grad = part.values.weight.grad
    assert grad is not None
    assert grad.to_dense().abs().sum(1).nonzero().flatten().tolist() == [0, 1]


def test_integers_in_lists_are_tags_and_numbers_are_vectors() -> None:
    """Lists of integers or text are tags; lists of other numbers are vectors; a kind by name overrides the type."""
    table = pl.DataFrame({"ids": [[1, 2], [2, 3]], "image": [[0.5, 1.0], [2.0, 3.0]]})
    features = Features.from_table(table, ["ids", "image"])
    assert features.tags[0].codes.tolist() == [[1, 2], [1, 3]]  # 2 is the most frequent
    assert features.dense.tolist() == [[0.5, 1.0], [2.0, 3.0]]
    assert features.names == ("image", "ids")
    assert Features.from_table(table, {"ids": "vector"}).dense.tolist() == [[1, 2], [2, 3]]
    both = features + Features.from_table(table, ["ids"])
    assert both.names == ("image", "ids", "ids")
    assert len(both.tags) == 2


def test_dense_sum_concat_and_perceptron_equal_their_formulas(tmp_path: Path) -> None:
    """Vectors of a file are returned unchanged; sums, concatenations and layers are those of the parts."""
    torch.manual_seed(0)
    array = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    np.save(tmp_path / "v.npy", array)
    dense, table = Dense(tmp_path / "v.npy"), IdTower(6, 3)
    ids = torch.tensor([[0, 5], [2, 2]])
    assert torch.equal(dense(ids), torch.from_numpy(array)[ids])
    assert torch.equal(Sum(dense, table)(ids), dense(ids) + table(ids))
    joined = Concat(dense, table, IdTower(6, 2))
    assert (joined.n, joined.dim) == (6, 8)
    tower = Perceptron(joined, (5,), 4)
    first, second = tower.layers[0], tower.layers[2]
    for i in range(6):
        x = torch.cat(rows(dense, [i]) + rows(table, [i]) + rows(joined.parts[2], [i]))
        hidden = [max(0.0, (w @ x + b).item()) for w, b in zip(first.weight, first.bias, strict=True)]  # type: ignore[arg-type]
        torch.testing.assert_close(
            tower(torch.tensor(i)),
            second.weight @ torch.tensor(hidden) + second.bias,  # type: ignore[operator]
        )
    assert Perceptron(joined, (), 4)(ids).shape == (2, 2, 4)
    assert "values" in dense.state_dict()
    assert "values" not in Dense(array, saved=False).state_dict()


@pytest.mark.parametrize("with_id", [True, False])
def test_feature_tower_is_a_perceptron_over_its_columns(with_id: bool) -> None:
    """The id, each column, the numbers and the vectors side by side; the output has `dim` dimensions."""
    vectors = np.ones((6, 2), np.float32)
    tower = FeatureTower(6, 4, some_features(), (8, 3), with_id, vectors=vectors, width=5)
    assert tower.dim == 4
    assert [type(part).__name__ for part in tower.inputs] == ["IdTower"] * with_id + [
        "Categories",
        "Tags",
        "Dense",
        "Dense",
    ]
    widths = [int(part.dim) for part in tower.inputs]  # type: ignore[arg-type]
    assert widths == [5] * with_id + [10, 5, 1, 2]
    ids = torch.arange(6)
    assert torch.equal(tower(ids), tower.layers(torch.cat([part(ids) for part in tower.inputs], 1)))
    assert [layer.out_features for layer in tower.layers if isinstance(layer, nn.Linear)] == [8, 3, 4]


def test_feature_tower_travels_with_its_features() -> None:
    """state_dict includes the features, so a tower built over blank ones becomes the trained one."""
    features = some_features()
    tower = FeatureTower(6, 4, features)
    blank = Features(
        np.zeros_like(features.categorical), features.cardinalities, features.dense * 0, features.names, features.tags
    )
    other = FeatureTower(6, 4, blank)
    other.load_state_dict(tower.state_dict())
    assert torch.equal(other(torch.arange(6)), tower(torch.arange(6)))


def test_bad_parts_are_one_line(tmp_path: Path) -> None:
    """A wrong number of rows, codes or dimensions, NaN in vectors, and nothing to read are one-line errors."""
    features = some_features()
    np.save(tmp_path / "nan.npy", np.array([[1.0], [np.nan]]))
    cases = [
        (lambda: FeatureTower(7, 4, features), "6 ids"),
        (lambda: FeatureTower(6, 4, features, vectors=np.zeros((5, 2))), "5 ids"),
        (lambda: FeatureTower(6, 4, features, (0,)), "at least one unit"),
        (lambda: FeatureTower(6, 4, None, with_id=False), "at least one feature"),
        (lambda: Categories(np.array([[3]]), (3,), 4), "cardinality"),
        (lambda: Categories(np.array([[1]]), (3, 3), 4), "2 columns"),
        (lambda: Dense(tmp_path / "nan.npy"), "row 1"),
        (lambda: Dense(np.zeros((3, 0))), "one dimension"),
        (lambda: Sum(IdTower(6, 4), IdTower(6, 5)), "4, 5"),
        (lambda: Concat(IdTower(6, 4), IdTower(7, 4)), "6, 7 ids"),
        (lambda: Concat(), "at least one part"),
        (lambda: Sum(nn.Sequential(nn.Embedding(3, 4)), IdTower(3, 4)), "Sequential"),
    ]
    for wrong, word in cases:
        with pytest.raises(UserError, match=word) as error:
            wrong()
        assert "\n" not in str(error.value)
    assert FeatureTower(6, 4, None)(torch.tensor([1])).shape == (1, 4)


def test_a_history_with_columns_is_their_sum() -> None:
    """The positive is left out of the history alone; a new query has no columns, so its history is its vector."""
    torch.manual_seed(0)
    item = IdTower(5, 4)
    past = Histories(torch.tensor([0, 2, 3]), torch.tensor([1, 3, 2], dtype=torch.int32))
    history, columns = HistoryTower(item, past, 3), FeatureTower(2, 4, None, vectors=np.eye(2), with_id=False)
    model = Retriever(DescribedHistory(history, columns), item, score="dot")
    ids, context = torch.tensor([0, 1]), Before(torch.tensor([2, 3]))
    want = history(ids, context) + columns(ids)
    torch.testing.assert_close(model.encode_queries(ids, context), want)
    deep = Retriever(Perceptron(Concat(history, columns), (6,), 4), item, score="dot")
    want = deep.query.layers(torch.cat([history(ids, context), columns(ids)], 1))  # type: ignore[operator, union-attr]
    torch.testing.assert_close(deep.encode_queries(ids, context), want)
    both = Retriever(Sum(history, columns), item, score="dot")
    torch.testing.assert_close(both.encode_queries(ids, context), model.encode_queries(ids, context))
    new = torch.tensor([[1, 3]])
    torch.testing.assert_close(model.encode_histories(new), history.encode_history(new))


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_mixtures_inside_the_tower(layer: int, bias: bool) -> None:
    """Items are mixed after the first layers and passed through the rest; a share of 1 is the item; biases mix."""
    torch.manual_seed(0)
    features = Features(torch.randint(3, (10, 2)).int().numpy(), (3, 3), torch.randn(10, 2).numpy(), tuple("abcd"))
    tower = FeatureTower(10, 5, features, hidden=(7, 6))
    model = Retriever(IdTower(3, 5), tower, item_bias=IdTower(10, 1) if bias else None)
    ids, weights = torch.tensor([[1, 4, 4], [9, 0, 2]]), torch.rand(2, 4, 3)
    got = model.encode_mixtures(ids, weights, layer)
    for g in range(2):
        hidden = [tower.layers[: 2 * layer](tower.part(ids[g, m : m + 1]))[0] for m in range(3)]
        for v in range(4):
            mixed = tower.layers[2 * layer :](sum((weights[g, v, m] * hidden[m] for m in range(3)), torch.zeros(())))
            mixed = mixed / mixed.norm()
            if bias:
                own = sum(float(weights[g, v, m] * model.item_bias(ids[g, m]).detach()) for m in range(3))  # type: ignore[misc]
                mixed = torch.cat([mixed, torch.tensor([own])])
            torch.testing.assert_close(got[g, v], mixed, rtol=1e-4, atol=1e-5)
    alone = model.encode_mixtures(ids, torch.eye(3).expand(2, 3, 3), layer)
    torch.testing.assert_close(alone, model.encode_items(ids), rtol=1e-4, atol=1e-5)


def test_mixtures_need_hidden_layers() -> None:
    """A table has no layers and a tower of two has no third: both are one-line errors."""
    with pytest.raises(ValueError, match="hidden layers"):
        Retriever(IdTower(3, 5), IdTower(4, 5)).encode_mixtures(torch.zeros(1, 2).long(), torch.ones(1, 1, 2), 1)
    with pytest.raises(ValueError, match="0 to 1"):
        FeatureTower(6, 5, some_features(), (7,)).mixtures(torch.zeros(1, 2).long(), torch.ones(1, 1, 2), 2)


def test_an_item_of_many_queries_is_encoded_once() -> None:
    """Candidates of each query have vectors and gradients as if alone; the layers see each item once."""
    tower = Perceptron(IdTower(7, 4), (6,), 5)
    ids, pull = torch.tensor([[3, 1, 3], [1, 6, 3]]), torch.randn(2, 3, 5)
    seen: list[int] = []
    tower.layers.register_forward_hook(lambda _module, inputs, _output: seen.append(len(inputs[0])))

    def gradients(vectors: torch.Tensor) -> list[torch.Tensor]:
        tower.zero_grad()
        (vectors * pull).sum().backward()
        return [weight.grad.to_dense().clone() for weight in tower.parameters() if weight.grad is not None]

    together = tower(ids)
    assert seen == [3]
    alone = torch.stack([torch.cat([tower(item.view(1)) for item in row]) for row in ids])
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(gradients(together), gradients(alone))
