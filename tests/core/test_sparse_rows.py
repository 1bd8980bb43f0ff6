"""Sums of table rows by bags, against loops and dense gradients."""

from __future__ import annotations

import torch

from sparring.core.sparse_rows import bag_sums, lookup


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
