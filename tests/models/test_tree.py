"""Decision trees against scikit-learn, against brute force for a single split, and without a possible split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.models.tree import Tree, grow


def predicted(tree: Tree, x: np.ndarray, depth: int) -> np.ndarray:
    """Walk every row down the tree, one step at a time."""
    found = []
    for row in x:
        node = 0
        for _ in range(depth):
            node = int(
                tree.below[node] if row[int(tree.feature[node])] <= float(tree.threshold[node]) else tree.above[node]
            )
        found.append(float(tree.chance[node]))
    return np.array(found)


def noisy(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 3)).astype(np.float32)
    return x, x[:, 0] * x[:, 1] + 0.5 * draw.normal(size=n) > 0.3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depth", [1, 3, 4])
def test_chances_are_those_of_scikit_learn(seed: int, depth: int) -> None:
    """If no two splits tie, known and new rows get scikit-learn's probabilities."""
    pytest.importorskip("sklearn")
    from sklearn.tree import DecisionTreeClassifier

    x, y = noisy(seed, 3000)
    tree = grow(torch.from_numpy(x), torch.from_numpy(y), depth)
    theirs = DecisionTreeClassifier(max_depth=depth, random_state=0).fit(x, y)
    fresh = np.concatenate([x[:500], noisy(seed + 10, 500)[0]])
    np.testing.assert_allclose(predicted(tree, fresh, depth), theirs.predict_proba(fresh)[:, 1], atol=1e-6)


def test_a_deep_tree_parts_as_well_as_scikit_learn() -> None:
    """Small nodes have several equally good splits, so only the remaining impurity must agree, within 3 %."""
    pytest.importorskip("sklearn")
    from sklearn.tree import DecisionTreeClassifier

    x, y = noisy(7, 1500)
    ours = predicted(grow(torch.from_numpy(x), torch.from_numpy(y), 7), x, 7)
    theirs = DecisionTreeClassifier(max_depth=7, random_state=0).fit(x, y).predict_proba(x)[:, 1]
    assert (ours * (1 - ours)).sum() == pytest.approx((theirs * (1 - theirs)).sum(), rel=0.03)


def test_one_split_is_the_best_of_all() -> None:
    """With repeated values the threshold is halfway between two values, and no other split leaves less impurity."""
    draw = np.random.default_rng(5)
    x = draw.integers(0, 6, (60, 2)).astype(np.float32)
    y = draw.random(60) < 0.2 + 0.6 * (x[:, 1] > 3)
    tree = grow(torch.from_numpy(x), torch.from_numpy(y), 1)

    def impurity(feature: int, threshold: float) -> float:
        sides = (x[:, feature] <= threshold, x[:, feature] > threshold)
        return float(sum(2 * y[side].mean() * (1 - y[side].mean()) * side.sum() for side in sides if side.any()))

    every = [(impurity(f, v + 0.5), f, v + 0.5) for f in range(2) for v in range(5)]
    assert impurity(int(tree.feature[0]), float(tree.threshold[0])) == pytest.approx(min(every)[0])
    assert float(tree.threshold[0]) % 1 == 0.5


@pytest.mark.parametrize("y", [[True] * 5, [False] * 5, [True, False, True, True, False]])
def test_what_cannot_be_parted_is_one_leaf(y: list[bool]) -> None:
    """A single class or identical rows give one leaf, whose probability is the share of True."""
    x = torch.ones(5, 3) if len(set(y)) > 1 else torch.randn(5, 3)
    tree = grow(x, torch.tensor(y), 7)
    assert int(tree.below[0]) == int(tree.above[0]) == 0
    assert float(tree.chance[0]) == pytest.approx(np.mean(y))


def test_nothing_to_learn_from_is_refused() -> None:
    """No rows and a different number of targets raise errors."""
    with pytest.raises(ValueError, match="n >= 1"):
        grow(torch.zeros(0, 3), torch.zeros(0, dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="as many targets"):
        grow(torch.zeros(4, 3), torch.zeros(3, dtype=torch.bool), 2)
