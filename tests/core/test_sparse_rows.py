"""Sums of table rows by bags, and row-sparse gradients of dense tables, against loops and dense gradients."""

from __future__ import annotations

import pytest
import torch

from sparring.core.sparse_rows import bag_sums, lookup, row_gradients
from sparring.kernels.native import library
from sparring.models.towers import IdTower


def test_bag_sums_equal_a_loop_and_give_each_row_once() -> None:
    """Values and gradients are those of a dense formula, repeats and empty bags included, after another lookup too."""
    torch.manual_seed(0)
    table = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    dense = table.detach().clone().requires_grad_()
    bags = [[4, 1, 1], [], [6], [1, 4]]
    ids = torch.tensor([i for bag in bags for i in bag])
    owners = torch.tensor([b for b, bag in enumerate(bags) for _ in bag])
    begin, weights = torch.tensor([0, 3, 3, 4]), torch.rand(6, dtype=torch.float64)
    got = bag_sums(table, ids, owners, begin, weights)
    parts, at = [], 0
    for bag in bags:
        total = torch.zeros(3, dtype=torch.float64)
        for item in bag:
            total = total + weights[at] * dense[item]
            at += 1
        parts.append(total)
    want = torch.stack(parts)
    torch.testing.assert_close(got, want)
    other = torch.tensor([5, 1])
    factor = torch.randn(4, 3, dtype=torch.float64)
    ((got * factor).sum() + lookup(table, other).square().sum()).backward()
    ((want * factor).sum() + dense[other].square().sum()).backward()
    assert table.grad is not None
    torch.testing.assert_close(table.grad.to_dense(), dense.grad)
    assert sorted(table.grad._indices()[0].tolist()) == [1, 1, 4, 5, 6]


@pytest.mark.parametrize("order", ["few, few", "few, all", "all, few"])
def test_rows_of_a_dense_table(order: str) -> None:
    """Inside `row_gradients` a few rows give a sparse gradient, and any sequence of lookups gives the dense sum."""
    tower = IdTower(6, 3, sparse=False)
    asked = {"few": torch.tensor([4, 1, 4]), "all": torch.arange(6)}
    which = [asked[name] for name in order.split(", ")]
    factors = [torch.randn(len(ids), 3) for ids in which]
    want = torch.zeros(6, 3)
    for ids, factor in zip(which, factors, strict=True):
        for row, gradient in zip(ids.tolist(), factor, strict=True):
            want[row] += gradient
    for wanted in (True, False):
        tower.weight.grad = None
        with row_gradients(wanted):
            for ids, factor in zip(which, factors, strict=True):
                (tower(ids) * factor).sum().backward()
        grad = tower.weight.grad
        assert grad is not None
        assert grad.is_sparse == (wanted and order == "few, few" and library.library() is not None)
        torch.testing.assert_close(grad.to_dense(), want)
