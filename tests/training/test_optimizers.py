"""Row rules against loops over rows, the choice of rule, saved state and schedules."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from sparring.core.sparse_rows import _repeated, lookup, sum_rows
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.training.light_optimizers import Adam, AdamW
from sparring.training.optimizers import (
    Schedule,
    about_large_tables,
    clip_gradients,
    load_state_tensors,
    optimizers,
    set_lr,
    state_tensors,
)
from sparring.training.row_optimizers import RowAdagrad, RowAdam

N, D = 40, 5


def a_table(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(N, D, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def batches(
    steps: int, size: int = 12, seed: int = 1, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    """Batches of (ids, gradients) that hit a quarter of the table, with many duplicates."""
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, N // 4, (size,), generator=g) for _ in range(steps)]
    return [(i, torch.randn(size, D, generator=g, dtype=dtype)) for i in ids]


def set_grad(table: nn.Parameter, ids: Tensor, values: Tensor) -> None:
    table.grad = torch.sparse_coo_tensor(ids[None], values, table.shape, check_invariants=True)


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def summed(ids: Tensor, values: Tensor) -> dict[int, list[float]]:
    """The gradient of each row, summed over the places of the batch."""
    total: dict[int, list[float]] = {}
    for row, value in zip(ids.tolist(), values.tolist(), strict=True):
        total[row] = [a + b for a, b in zip(total.get(row, [0.0] * D), value, strict=True)]
    return total


@pytest.mark.parametrize("bias", ["row", "step"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_row_adam_equals_a_loop_over_the_rows_of_the_batch(bias: str, decay: float) -> None:
    """Touched rows follow Adam with their own moments and count; duplicates are summed, decay applies once."""
    table, lr, b1, b2, eps = a_table(), 0.03, 0.8, 0.95, 1e-8
    want = table.detach().clone().tolist()
    m, v, t = [[0.0] * D for _ in range(N)], [[0.0] * D for _ in range(N)], [0] * N
    optimizer = RowAdam([table], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, bias=bias)  # type: ignore[arg-type]
    for step, (ids, values) in enumerate(batches(8), start=1):
        set_grad(table, ids, values)
        optimizer.step()
        for row, gradient in summed(ids, values).items():
            t[row] += 1
            n = t[row] if bias == "row" else step
            for d, g in enumerate(gradient):
                m[row][d] = b1 * m[row][d] + (1 - b1) * g
                v[row][d] = b2 * v[row][d] + (1 - b2) * g * g
                move = lr * (m[row][d] / (1 - b1**n)) / (math.sqrt(v[row][d] / (1 - b2**n)) + eps)
                want[row][d] = want[row][d] * (1 - lr * decay) - move
    assert torch.allclose(table.detach(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_row_adagrad_equals_a_loop_over_the_rows_of_the_batch(decay: float) -> None:
    """The accumulator of a row grows by the mean square of its summed gradient."""
    table, lr, eps = a_table(), 0.05, 1e-6
    want, acc = table.detach().clone().tolist(), [0.0] * N
    optimizer = RowAdagrad([table], lr=lr, eps=eps, weight_decay=decay)
    for ids, values in batches(8):
        set_grad(table, ids, values)
        optimizer.step()
        for row, gradient in summed(ids, values).items():
            acc[row] += sum(g * g for g in gradient) / D
            want[row] = [
                p * (1 - lr * decay) - lr * g / (math.sqrt(acc[row]) + eps)
                for p, g in zip(want[row], gradient, strict=True)
            ]
    assert torch.allclose(table.detach(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", ["row", "step"])
def test_row_adam_equals_dense_adamw_when_every_row_is_in_every_batch(bias: str) -> None:
    """If every batch has every row, lazy Adam equals torch.optim.AdamW in float32."""
    lazy, dense = a_table(dtype=torch.float32), a_table(dtype=torch.float32)
    ours = RowAdam([lazy], lr=0.01, weight_decay=0.1, bias=bias)  # type: ignore[arg-type]
    theirs = torch.optim.AdamW([dense], lr=0.01, weight_decay=0.1)
    g = torch.Generator().manual_seed(3)
    for _ in range(20):
        ids = torch.cat([torch.randperm(N, generator=g), torch.randint(0, N, (30,), generator=g)])
        values = torch.randn(len(ids), D, generator=g)
        set_grad(lazy, ids, values)
        dense.grad = torch.zeros(N, D).index_add_(0, ids, values)
        ours.step()
        theirs.step()
    assert torch.allclose(lazy, dense, rtol=0, atol=2e-6)


def test_row_adam_by_step_is_torchs_sparse_adam() -> None:
    """With bias="step" and a tiny eps, partial batches move the table like torch.optim.SparseAdam."""
    table, other = a_table(), a_table()
    ours, theirs = (
        RowAdam([table], lr=0.02, eps=1e-18, bias="step"),
        torch.optim.SparseAdam([other], lr=0.02, eps=1e-18),
    )
    for ids, values in batches(10):
        set_grad(table, ids, values)
        set_grad(other, ids, values)
        ours.step()
        theirs.step()
    assert torch.allclose(table, other, rtol=0, atol=1e-12)


def test_first_step_of_a_late_row_has_length_lr_by_row_and_is_longer_by_step() -> None:
    """A row first seen at step 1001 moves by lr with bias="row" and by about 3.2 lr with bias="step"."""
    moved = {}
    for bias in ("row", "step"):
        table = a_table()
        optimizer = RowAdam([table], lr=0.01, bias=bias)
        for _ in range(1000):
            set_grad(table, torch.tensor([0]), torch.ones(1, D, dtype=torch.float64))
            optimizer.step()
        before = table[7, 0].item()
        set_grad(table, torch.tensor([7]), torch.ones(1, D, dtype=torch.float64))
        optimizer.step()
        moved[bias] = before - table[7, 0].item()
    assert moved["row"] == pytest.approx(0.01, rel=1e-6)
    assert moved["step"] == pytest.approx(0.01 * 0.1 / math.sqrt(0.001 / (1 - 0.999**1001)), rel=1e-5)


@pytest.mark.parametrize("rule", [RowAdam, RowAdagrad])
def test_rows_outside_the_batch_stay_bitwise(rule: type[RowAdam] | type[RowAdagrad]) -> None:
    """Neither momentum nor decay changes a row outside the batch, and all rows of the batch move."""
    table = a_table(dtype=torch.float32)
    before = table.detach().clone()
    optimizer = rule([table], lr=0.1, weight_decay=0.5)
    set_grad(table, torch.tensor([1, 2, 3]), torch.ones(3, D))
    optimizer.step()
    between = table.detach().clone()
    set_grad(table, torch.tensor([3, 9]), torch.ones(2, D))
    optimizer.step()
    same = [torch.equal(table[r], between[r]) for r in range(N)]
    assert [r for r in range(N) if not same[r]] == [3, 9]
    assert [r for r in range(N) if not torch.equal(between[r], before[r])] == [1, 2, 3]


@pytest.mark.parametrize("rule", [RowAdam, RowAdagrad])
def test_more_rows_than_one_block(rule: type[RowAdam] | type[RowAdagrad], monkeypatch: pytest.MonkeyPatch) -> None:
    """Updating in blocks equals updating at once, bitwise."""
    results = []
    for block in (1 << 20, 3 * D):
        monkeypatch.setattr("sparring.training.row_optimizers._BLOCK", block)
        table = a_table(dtype=torch.float32)
        optimizer = rule([table], lr=0.1)
        for ids, values in batches(4, dtype=torch.float32):
            set_grad(table, ids, values)
            optimizer.step()
        results.append(table.detach())
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("rule", [RowAdam, RowAdagrad])
def test_runs_repeat_bitwise(rule: type[RowAdam] | type[RowAdagrad]) -> None:
    """The same batches give the same table bit for bit, with two threads and hundreds of duplicates of a row."""
    results = []
    for _ in range(2):
        table = a_table(dtype=torch.float32)
        optimizer = rule([table], lr=0.1)
        for ids, values in batches(3, size=3000, dtype=torch.float32):
            set_grad(table, ids, values)
            optimizer.step()
        results.append(table.detach())
    assert torch.equal(results[0], results[1])


def test_sum_rows_sums_duplicates_and_takes_expanded_gradients() -> None:
    """Each row occurs once, ascending, with the sum over its places; a gradient of stride 0 (loss.sum()) works."""
    ids, values = torch.tensor([5, 2, 5, 5, 0]), torch.arange(25.0).reshape(5, 5)
    table = nn.Parameter(torch.zeros(N, D))
    set_grad(table, ids, values)
    rows, total = sum_rows(grad_of(table))
    assert rows.tolist() == [0, 2, 5]
    assert total.tolist() == [values[4].tolist(), values[1].tolist(), (values[0] + values[2] + values[3]).tolist()]
    table.grad = None
    torch.nn.functional.embedding(ids, table, sparse=True).sum().backward()
    rows, total = sum_rows(grad_of(table))
    assert total.tolist() == [[1.0] * 5, [1.0] * 5, [3.0] * 5]


@pytest.mark.parametrize("size", [2, 7, 500])
def test_the_form_for_other_devices_repeats_each_row_with_its_whole_sum(size: int) -> None:
    """Every place gets the sum over all places of its row, so the number of rows is not needed."""
    ids, values = batches(1, size=size)[0]
    rows, total = _repeated(ids, values)
    want = summed(ids, values)
    assert rows.tolist() == sorted(ids.tolist())
    assert torch.allclose(total, torch.tensor([want[row] for row in rows.tolist()], dtype=torch.float64), atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", [RowAdam, RowAdagrad])
def test_on_cuda_a_step_equals_the_cpu_and_never_waits(rule: type[RowAdam] | type[RowAdagrad]) -> None:
    """Rows equal the CPU's up to rounding, repeat bitwise, and no host synchronisation occurs."""
    results = []
    for device in ("cpu", "cuda", "cuda"):
        table = nn.Parameter(a_table(dtype=torch.float32).detach().to(device))
        optimizer = rule([table], lr=0.1, weight_decay=0.1)
        for ids, values in batches(5, size=3000, dtype=torch.float32):
            table.grad = torch.sparse_coo_tensor(
                ids[None].to(device), values.to(device), table.shape, check_invariants=False
            )
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append(table.detach().cpu())
    assert torch.allclose(results[0], results[1], atol=1e-4)
    assert torch.equal(results[1], results[2])


def test_a_table_used_twice_in_a_step_gets_both_gradients() -> None:
    """Two lookups of one table in one loss add up as in the dense gradient."""
    tower = IdTower(N, D)
    first, second = torch.tensor([1, 2, 2]), torch.tensor([[2, 3]])
    (tower(first).square().sum() + 3 * tower(second).sum()).backward()
    rows, total = sum_rows(grad_of(tower.weight))
    w = tower.weight.detach()
    assert rows.tolist() == [1, 2, 3]
    assert torch.allclose(total, torch.stack([2 * w[1], 4 * w[2] + 3, torch.full((D,), 3.0)]))


def test_dense_gradients_are_refused_in_one_line() -> None:
    """A row rule raises on a dense gradient, on which it would silently be another rule."""
    table = a_table()
    table.grad = torch.zeros_like(table)
    with pytest.raises(ValueError, match=r"RowAdam got a dense gradient.*sparse=True") as raised:
        RowAdam([table]).step()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_sees_the_summed_rows(max_norm: float) -> None:
    """The joint norm of sparse and dense gradients is that of the dense ones, and both shrink by one factor."""
    table, other = a_table(), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    ids, values = batches(1)[0]
    set_grad(table, ids, values)
    other.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    full = torch.zeros(N, D, dtype=torch.float64).index_add_(0, ids, values)
    norm = math.sqrt(full.square().sum().item() + 14.0)
    assert clip_gradients([table, other], max_norm).item() == pytest.approx(norm)
    factor = min(1.0, max_norm / norm)
    assert torch.allclose(grad_of(table).to_dense(), full * factor, atol=1e-5)
    assert torch.allclose(other.grad, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * factor, atol=1e-5)


class Mixed(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.query, self.item = IdTower(N, D, sparse=sparse), nn.Embedding(N, D, sparse=sparse)
        self.layer = nn.Linear(D, D)
        self.log_tau = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def loss(self, seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        q, e = self.query(torch.randint(0, N, (16,), generator=g)), self.item(torch.randint(0, N, (16,), generator=g))
        return torch.logsumexp(self.layer(q) @ e.T * torch.exp(self.log_tau), 1).mean()


def run(model: Mixed, rules: list[torch.optim.Optimizer], seeds: range) -> None:
    for seed in seeds:
        model.loss(seed).backward()
        for optimizer in rules:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("rule", "kind"), [("row-adam", RowAdam), ("row-adagrad", RowAdagrad)])
def test_tables_get_the_row_rule_and_the_rest_adamw(rule: str, kind: type) -> None:
    """Every trained parameter has exactly one optimiser; scalars and biases are not decayed."""
    model = Mixed()
    found = optimizers(model, rule, lr=0.1, weight_decay=0.01, dense_lr=0.02)  # type: ignore[arg-type]
    assert [type(o) for o in found] == [kind, AdamW]
    owned = [{id(p) for g in o.param_groups for p in g["params"]} for o in found]
    assert owned[0] == {id(model.query.weight), id(model.item.weight)}
    assert owned[1] == {id(model.layer.weight), id(model.layer.bias), id(model.log_tau)}
    decays = {id(p): g["weight_decay"] for g in found[1].param_groups for p in g["params"]}
    assert decays == {id(model.layer.weight): 0.01, id(model.layer.bias): 0.0, id(model.log_tau): 0.0}
    assert [g["lr"] for o in found for g in o.param_groups] == [0.1, 0.02, 0.02]


def test_a_table_shared_by_both_towers_is_updated_once() -> None:
    """One parameter under two names has one optimiser entry."""
    tower = IdTower(N, D)
    found = optimizers(Retriever(tower, tower))
    assert [len(g["params"]) for o in found for g in o.param_groups] == [1]


def test_rule_adam_is_coupled_adam_on_every_row() -> None:
    """The reproduction rule equals a float64 loop of Adam with L2 in the gradient, for seen and unseen rows."""
    tower = IdTower(N, D, sparse=False)
    want = tower.weight.detach().double()
    m, v, lr, decay = torch.zeros_like(want), torch.zeros_like(want), 0.01, 1e-2
    (optimizer,) = optimizers(tower, "adam", lr=lr, weight_decay=decay)
    for t in range(1, 11):
        ids = torch.tensor([t % N, 3, 3])
        tower(ids).square().sum().backward()
        grad = torch.zeros_like(want)
        for i in ids.tolist():
            grad[i] += 2 * want[i]
        grad += decay * want
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        want = want - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(tower.weight.detach().double(), want, atol=2e-6)


def test_dense_adam_on_large_tables_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts the rows and names the setting; small tables and row rules have none."""
    model = Retriever(IdTower(N, D, sparse=False), IdTower(2 * N, D, sparse=False))
    assert about_large_tables(model, "adam") is None
    monkeypatch.setattr("sparring.training.optimizers.LARGE", 3 * N * D)
    assert about_large_tables(model, "row-adam") is None
    line = about_large_tables(model, "adam")
    assert line is not None
    assert f"{3 * N:,} rows" in line
    assert "optimizer=row-adam" in line


def test_rule_errors_are_one_line() -> None:
    """A sparse table under dense Adam and an unknown rule raise with advice."""
    with pytest.raises(ValueError, match=r"query\.weight .*sparse=False$"):
        optimizers(Mixed(), "adam")
    with pytest.raises(ValueError, match="sgd"):
        optimizers(Mixed(), "sgd")  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["row-adam", "row-adagrad", "adam"])
def test_saved_state_continues_bitwise(rule: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """3 steps, a round trip through safetensors and 3 steps equal 6 steps, learning rate included."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    model = Mixed(sparse=rule != "adam")
    rules = optimizers(model, rule, lr=0.1)  # type: ignore[arg-type]
    set_lr(rules, 0.3)
    run(model, rules, range(3))
    save_file(state_tensors(rules), tmp_path / "o.safetensors")
    other = copy.deepcopy(model)
    resumed = optimizers(other, rule, lr=0.1)  # type: ignore[arg-type]
    load_state_tensors(resumed, load_file(tmp_path / "o.safetensors"))
    assert [g["lr"] for o in resumed for g in o.param_groups] == [g["lr"] for o in rules for g in o.param_groups]
    before, after = state_tensors(rules), state_tensors(resumed)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    run(model, rules, range(3, 6))
    run(other, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_state_dict_round_trip_continues_bitwise() -> None:
    """Row rules also save and load with torch's state_dict."""
    model = Mixed()
    rules = optimizers(model)
    run(model, rules, range(2))
    other = copy.deepcopy(model)
    resumed = optimizers(other)
    for new, old in zip(resumed, rules, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    run(model, rules, range(2, 4))
    run(other, resumed, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_state_of_another_model_is_refused() -> None:
    """Wrong shapes, unknown names and missing groups raise one-line errors before anything is changed."""
    small, large = IdTower(3, 2), IdTower(4, 2)
    rules = optimizers(large)
    large(torch.tensor([0])).sum().backward()
    rules[0].step()
    saved = state_tensors(rules)
    target = optimizers(small)
    with pytest.raises(ValueError, match="fits no parameter"):
        load_state_tensors(target, saved)
    with pytest.raises(ValueError, match=r"lacks 0\.rate\.0"):
        load_state_tensors(target, {})
    with pytest.raises(ValueError, match="fits no parameter"):
        load_state_tensors(target, {"0.rate.0": torch.tensor(1.0), "7.state.0.mean": torch.zeros(3, 2)})
    assert not target[0].state
    assert target[0].param_groups[0]["lr"] == 1e-3


def test_schedules() -> None:
    """Step decay, cosine, linear and warm-up equal values by hand, computed from the initial rate."""
    step = Schedule("step", gamma=0.95, every=5)
    assert [step.lr_at(0, e) for e in (0, 4, 5, 14)] == [1.0, 1.0, 0.95, pytest.approx(0.9025)]
    cosine = Schedule("cosine", warmup=4, total=104, floor=0.1)
    assert [cosine.lr_at(s, 0) for s in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert cosine.lr_at(54, 9) == pytest.approx(0.55)
    assert [cosine.lr_at(s, 0) for s in (104, 1000)] == [pytest.approx(0.1)] * 2
    linear = Schedule("linear", warmup=4, total=104, floor=0.1)
    assert [linear.lr_at(s, 0) for s in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert linear.lr_at(29, 9) == pytest.approx(0.1 + 0.9 * 75 / 100)
    assert [linear.lr_at(s, 0) for s in (104, 1000)] == [pytest.approx(0.1)] * 2
    assert [Schedule(warmup=2).lr_at(s, 3) for s in (0, 1, 2)] == [0.5, 1.0, 1.0]
    rules = optimizers(IdTower(3, 2), lr=0.2)
    set_lr(rules, 0.5)
    set_lr(rules, 0.25)
    assert rules[0].param_groups[0]["lr"] == 0.05
    with pytest.raises(ValueError, match="total > warmup"):
        Schedule("cosine", warmup=5, total=5)
    with pytest.raises(ValueError, match="'square' is not known"):
        Schedule("square")  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 5])
def test_lookups_of_one_table_are_put_side_by_side(width: int) -> None:
    """Two lookups with more places than the table has entries give one row per place, and sum to the dense gradient."""
    g = torch.Generator().manual_seed(2)
    table = nn.Parameter(torch.randn(7, width, generator=g, dtype=torch.float64))
    ids = torch.randint(7, (40, 3), generator=g), torch.randint(7, (11,), generator=g)
    upstream = [torch.randn(*i.shape, width, generator=g, dtype=torch.float64) for i in ids]
    for i in ids:
        assert torch.equal(lookup(table, i), table.detach()[i])
    sum((lookup(table, i) * u).sum() for i, u in zip(ids, upstream, strict=True)).backward()  # type: ignore[union-attr]
    gradient = grad_of(table)
    assert not gradient.is_coalesced()
    places = sorted(zip(gradient._indices()[0].tolist(), gradient._values().tolist(), strict=True))
    assert places == sorted(
        (int(i), u.tolist())
        for some, ups in zip(ids, upstream, strict=True)
        for i, u in zip(some.flatten(), ups.flatten(0, -2), strict=True)
    )
    dense = torch.zeros(7, width, dtype=torch.float64)
    for row, value in places:
        dense[row] += torch.tensor(value, dtype=torch.float64)
    torch.testing.assert_close(gradient.to_dense(), dense)


def test_a_frozen_table_is_looked_up_without_a_gradient() -> None:
    """Parameters that require no gradient get none."""
    table = a_table().requires_grad_(False)
    assert not lookup(table, torch.tensor([1, 2])).requires_grad


@pytest.mark.parametrize(("light", "plain"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
@pytest.mark.parametrize("fused", [False, True])
def test_light_optimisers_equal_those_of_torch_bitwise(
    light: type[torch.optim.Optimizer], plain: type[torch.optim.Optimizer], fused: bool
) -> None:
    """The optimisers that skip the import of torch._dynamo make the updates of torch's own."""
    ours, theirs = a_table(dtype=torch.float32), a_table(dtype=torch.float32)
    pairs = [
        (table, kind([table], lr=0.02, weight_decay=0.1, fused=fused))
        for table, kind in ((ours, light), (theirs, plain))
    ]  # type: ignore[call-arg]
    for step in range(4):
        grad = a_table(step + 7, torch.float32).detach()
        for table, optimizer in pairs:
            optimizer.zero_grad()
            assert table.grad is None
            table.grad = grad.clone()
            optimizer.step()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, a_table(dtype=torch.float32))


def test_a_training_step_imports_neither_the_compiler_nor_figures() -> None:
    """Sparse and dense optimisers step without torch._dynamo, sympy or matplotlib, which take seconds to import."""
    code = """
import sys, torch, sparring.training.fitting
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.training.optimizers import optimizers
from torch import nn
model = nn.ModuleList([IdTower(8, 4, sparse=True), nn.Linear(4, 4)])
built = optimizers(model, "row-adam") + optimizers(nn.Linear(4, 4), "adam")
for optimizer in built:
    optimizer.zero_grad()
model[1](model[0](torch.arange(3))).sum().backward()
for optimizer in built:
    optimizer.step()
print(*(type(optimizer).__name__ for optimizer in built))
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, modules = done.stdout.splitlines()
    assert names.split() == ["RowAdam", "AdamW", "Adam"]
    assert not {"torch._dynamo", "sympy", "matplotlib"} & set(modules.split())
