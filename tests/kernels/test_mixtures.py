"""The Triton kernels of ESANS, in the interpreter without a GPU: shares, mixtures and cluster draws, by brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sparring.core.types import Bag, Step
from sparring.kernels import ExcludedKeys, cluster_draws, mixtures
from sparring.kernels.reference import Mix
from sparring.losses import sampled_softmax
from sparring.models.clusters import Codes
from sparring.negatives import Interpolated, OtherClusters, SameCluster, TowardsPositive, Union
from sparring.testing import chi_square

# the interpreter's inf - inf, and logarithm of 0, in the branch of a `where` that is not taken
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}:RuntimeWarning") for words in ("divide by zero", "invalid value")
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["minmax_block", "minmax_set", "affine", "dirichlet"]


def seed(*numbers: int) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


def vectors(*shape: int, start: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(start))


@pytest.mark.parametrize(("m", "d"), [(2, 3), (3, 70), (5, 16), (9, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_by_hand(kind: str, m: int, d: int) -> None:
    """Each size 2..m has one set, each member is the anchor once, and shares are d(anchor, i)^eta over the set."""
    eta, emb = 0.6, vectors(8, m, d)
    shares = mixtures.shares(emb.to(DEVICE), seed(5), 0, eta, kind).cpu().double()
    assert shares.shape == (8, (m + 2) * (m - 1) // 2, m)
    assert bool((shares >= 0).all())
    torch.testing.assert_close(shares.sum(-1), torch.ones(shares.shape[:2]).double())
    gram = (emb.double() @ emb.double().mT).tolist()
    for g in range(8):
        begin = 0
        for n in range(2, m + 1):
            part, begin = shares[g, begin : begin + n], begin + n
            members = torch.nonzero(part[0] > 0).flatten().tolist()
            assert len(members) == n
            assert bool(((part > 0) == (part[0] > 0)).all())
            if kind == "dirichlet":
                continue
            over = range(m) if kind == "minmax_block" else members
            low, high = (pick(gram[g][a][b] for a in over for b in over) for pick in (min, max))
            want = []
            for a in members:
                row = [0.0] * m
                for i in members:
                    near = (gram[g][a][i] - low) / (high - low + 1e-6)
                    if kind == "affine":
                        near = (1 + gram[g][a][i] / math.sqrt(gram[g][a][a] * gram[g][i][i])) / 2
                    row[i] = max(near, 1e-6) ** eta
                want.append(torch.tensor(row, dtype=torch.float64) / sum(row))
            for row in want:  # the anchors are in random order
                assert float((part - row).abs().amax(1).min()) < 1e-4


def test_every_set_and_order_is_as_likely() -> None:
    """Over 200 groups of 4, all sets and orders are equally frequent, independent of size and group."""
    shares = mixtures.shares(vectors(1, 4, 3).expand(200, 4, 3).to(DEVICE), seed(1 << 61), 0, 1.0, "minmax_block").cpu()
    alone = []
    for n, begin in ((2, 0), (3, 2), (4, 5)):
        member = shares[:, begin] > 0
        sets = list(itertools.combinations(range(4), n))
        number = torch.full((200,), -1)
        for at, chosen in enumerate(sets):
            number[(member == torch.tensor([i in chosen for i in range(4)])).all(1)] = at
        assert chi_square(torch.bincount(number, minlength=len(sets)), torch.ones(len(sets))) > 1e-4
        # equal vectors in all groups: a mixture's row of shares identifies its anchor
        anchors = shares[:, begin : begin + n].mul(1e4).round().unique(dim=0, return_inverse=True)[1]
        orders = math.factorial(4) // math.factorial(4 - n)
        assert chi_square(torch.bincount(anchors, minlength=orders), torch.ones(orders)) > 1e-4
        alone.append(number)
    assert chi_square(torch.bincount(alone[0] * 4 + alone[1], minlength=24), torch.ones(24)) > 1e-4
    assert (
        chi_square(torch.bincount(alone[0][1:] * 6 + alone[0][:-1], minlength=36), torch.ones(36)) > 1e-4
    )  # neighbouring groups


def test_random_shares_are_uniform_on_their_simplex() -> None:
    """dirichlet: the share of a pair's first member is uniform; of three, (1 - share)^2 is."""
    shares = mixtures.shares(torch.zeros(80, 3, 2, device=DEVICE), seed(3), 0, 1.0, "dirichlet").cpu()
    for column in (shares[:, :2, 0][shares[:, :2, 0] > 0], (1 - shares[:, 2:, 1].flatten()) ** 2):
        assert chi_square(torch.histc(column, 10, 0, 1), torch.ones(10)) > 1e-4


@pytest.mark.parametrize("kind", ["minmax_set", "dirichlet"])
def test_groups_drawn_in_parts_are_drawn_as_in_one(kind: str) -> None:
    """The second half of the groups gets the same shares as in one call; another seed gives others."""
    emb = vectors(6, 4, 3).to(DEVICE)
    whole = mixtures.shares(emb, seed(7), 0, 0.6, kind)
    assert torch.equal(mixtures.shares(emb[3:], seed(7), 3, 0.6, kind), whole[3:])
    assert not torch.equal(mixtures.shares(emb, seed(8), 0, 0.6, kind), whole)


@pytest.mark.parametrize(
    ("keyed", "offset", "shape"),
    [
        ("both", -0.8, (140, 30, 5, 12)),
        *((keyed, 0.0, shape) for keyed in ("both", "real", "made", "none") for shape in ((9, 7, 3, 5), (3, 1, 2, 1))),
    ],
)
def test_value_and_gradients(keyed: str, offset: float, shape: tuple[int, int, int, int]) -> None:
    """With real candidates and mixtures excluded by separate keys and weights of -inf, results equal float64 sums."""
    b, groups, m, d = shape
    random = torch.Generator().manual_seed(b)
    q, emb, log_w = (torch.randn(*size, generator=random) for size in ((b, d), (groups * m, d), (groups * m,)))
    log_w[::11] = -math.inf
    v = (m + 2) * (m - 1) // 2
    share = mixtures.shares(emb.view(groups, m, d).to(DEVICE), seed(2), 0, 0.6, "minmax_block")
    cells, own_cell = torch.randint(6, (groups * m,), generator=random), torch.randint(6, (b,), generator=random)
    classes, own_class = torch.randint(3, (groups,), generator=random), torch.randint(3, (b,), generator=random)
    real = torch.zeros(b, groups * m, dtype=torch.bool) if keyed in ("made", "none") else own_cell.unsqueeze(1) == cells
    made = torch.zeros(b, groups, dtype=torch.bool) if keyed in ("real", "none") else own_class.unsqueeze(1) == classes
    upstream = torch.randn(b, generator=random)

    exact_q, exact_emb = q.double().requires_grad_(), emb.double().requires_grad_()
    w = share.cpu().double()
    mixed = torch.einsum("gvm,gmd->gvd", w, exact_emb.view(groups, m, d)).reshape(-1, d)
    mixed_w = torch.where(w > 0, w * log_w.double().view(groups, 1, m), 0.0).sum(-1).flatten() + offset
    table = torch.cat(
        [
            (exact_q @ exact_emb.T + log_w.double()).masked_fill(real, -math.inf),
            (exact_q @ mixed.T + mixed_w).masked_fill(made.repeat_interleave(v, 1), -math.inf),
        ],
        1,
    )
    some = torch.isfinite(table).any(1)
    exact = torch.logsumexp(table[some], 1)
    (exact * upstream[some].double()).sum().backward()

    ours_q, ours_emb = q.to(DEVICE, copy=True).requires_grad_(), emb.to(DEVICE, copy=True).requires_grad_()
    places = ExcludedKeys(cells.to(DEVICE), own_cell.to(DEVICE)) if keyed in ("both", "real") else None
    mix_places = ExcludedKeys(classes.to(DEVICE), own_class.to(DEVICE)) if keyed in ("both", "made") else None
    value = mixtures.weighted_logsumexp(ours_q, ours_emb, log_w.to(DEVICE), places, Mix(share, mix_places, offset))
    assert torch.equal(torch.isfinite(value).cpu(), some)
    (torch.where(torch.isfinite(value), value, 0.0) * upstream.to(DEVICE)).sum().backward()
    torch.testing.assert_close(value.detach().cpu().double()[some], exact.detach(), rtol=1e-5, atol=2e-5)
    for mine, right in ((ours_q.grad, exact_q.grad), (ours_emb.grad, exact_emb.grad)):
        assert mine is not None
        assert right is not None
        torch.testing.assert_close(mine.cpu().double(), right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("per_query", [False, True])
def test_towards_the_positive(per_query: bool) -> None:
    """Each candidate e adds the mixture lam v + (1 - lam) e, with weights and ids; gradients reach both by share."""
    b, m, d = 6, 3, 5
    emb, v, upstream, log_w = (
        vectors(b, m, d),
        vectors(b, d, start=1),
        vectors(b, 2 * m, d, start=2),
        vectors(b, m, start=3),
    )
    log_w[0, 1] = -math.inf
    ids = torch.arange(b * m).view(b, m)
    lam = torch.linspace(-0.2, 0.5, b) if per_query else torch.tensor([0.3])
    exact_emb, exact_v = emb.double().requires_grad_(), v.double().requires_grad_()
    share = lam.double().view(-1, 1, 1)
    want = torch.cat([exact_emb, share * exact_v.unsqueeze(1) + (1 - share) * exact_emb], 1)
    (want * upstream.double()).sum().backward()
    ours_emb, ours_v = emb.to(DEVICE, copy=True).requires_grad_(), v.to(DEVICE, copy=True).requires_grad_()
    got, weight, number = mixtures.towards(ours_emb, ours_v, lam.to(DEVICE), log_w.to(DEVICE), ids.to(DEVICE), 0.4)
    (got * upstream.to(DEVICE)).sum().backward()
    torch.testing.assert_close(got.detach().cpu().double(), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.cpu(), torch.cat([log_w, log_w + 0.4], 1))
    assert number.tolist() == [[*row, -1, -1, -1] for row in ids.tolist()]
    for mine, right in ((ours_emb.grad, exact_emb.grad), (ours_v.grad, exact_v.grad)):
        assert mine is not None
        assert right is not None
        torch.testing.assert_close(mine.cpu().double(), right, rtol=1e-5, atol=1e-5)


# cluster 3 is empty, cluster 2 has one cell, cluster 5 has two items
PRIMARY = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 4, 4, 4, 4, 5, 5]
SECONDARY = [0, 0, 1, 1, 2, 0, 1, 1, 1, 1, 0, 0, 2, 1, 0, 2]
ROWS = 160


def codes() -> Codes:
    deal = torch.randperm(16, generator=torch.Generator().manual_seed(4))
    return Codes(torch.tensor(PRIMARY)[deal], torch.tensor(SECONDARY)[deal], vectors(6, 3, start=5), 3)


def items_of(found: Codes, positives: list[int]) -> tuple[Tensor, list[int], list[int]]:
    """Many rows with these positives in turn, and the cell and primary cluster of every item."""
    return (
        torch.tensor(positives).repeat(ROWS // len(positives)).to(DEVICE),
        found.cell_of.tolist(),
        found.primary.tolist(),
    )


def test_simple_ones_follow_equation_9() -> None:
    """Two other clusters are drawn without replacement by their probabilities, with a uniform set of items each."""
    found = codes()
    sampler = OtherClusters(found, m_c=2, m_o=3, gamma=1.5).to(DEVICE)
    items, cell, primary = items_of(found, [3])
    tables = sampler.cell, sampler.order, sampler.start, sampler.chance
    (ids, real, log_w, cells, own), clusters = cluster_draws.others(items, *tables, 3, 2, 3, seed(9, 1 << 60))
    ids, clusters = ids.cpu(), clusters.cpu()
    assert torch.equal(real.cpu(), ids)
    assert bool((log_w == 0).all())
    assert cells.cpu().tolist() == [[cell[j] for j in row] for row in ids.tolist()]
    assert own.cpu().tolist() == [[cell[3]] * ROWS, [primary[3]] * ROWS]
    assert [[primary[j] for j in row] for row in ids.tolist()] == clusters.repeat_interleave(3, 1).tolist()
    p = sampler.chance[primary[3]].double().cpu()
    want = torch.zeros(6, 6, dtype=torch.float64)
    for a, b in itertools.permutations(range(6), 2):
        want[a, b] = p[a] * p[b] / (1 - p[a]) if p[a] > 0 else 0.0
    assert chi_square(torch.bincount(clusters[:, 0] * 6 + clusters[:, 1], minlength=36), want.flatten()) > 1e-4
    for k in range(6):
        members = [j for j in range(16) if primary[j] == k]
        rows = torch.cat([ids[clusters[:, c] == k, 3 * c : 3 * c + 3] for c in range(2)])
        if len(members) >= 3 and len(rows):
            assert all(len(set(row)) == 3 for row in rows.tolist())
            sets = list(itertools.combinations(members, 3))
            counts = torch.tensor([sum(sorted(row) == sorted(chosen) for row in rows.tolist()) for chosen in sets])
            assert chi_square(counts, torch.ones(len(sets))) > 1e-4
        elif len(rows):
            for slot in range(3):
                counts = torch.bincount(rows[:, slot], minlength=16)
                assert chi_square(counts, torch.tensor([float(j in members) for j in range(16)])) > 1e-4


def test_hard_ones_come_from_the_cluster_less_the_cell() -> None:
    """All pairs of items of the positive's cluster outside its cell are equally likely; the next is a fallback."""
    found = codes()
    sampler = SameCluster(found, m_h=2).to(DEVICE)
    positives = [found.cell_of.tolist().index(cell) for cell in (0, 1, 12, 7)]  # the last cell is its complete cluster
    items, cell, primary = items_of(found, positives)
    ids, _, log_w, cells, own = (
        x.cpu() for x in cluster_draws.same(items, sampler.cell, sampler.order, sampler.pool, 3, 2, seed(11))
    )
    assert bool((log_w == 0).all())
    assert cells.tolist() == [[cell[j] for j in row] for row in ids.tolist()]
    assert own[0].tolist() == [cell[j] for j in items.tolist()]
    assert own[1].tolist() == [primary[j] for j in items.tolist()]
    for at, positive in enumerate(positives):
        rows = ids[at :: len(positives)].tolist()
        others = [j for j in range(16) if primary[j] == primary[positive] and cell[j] != cell[positive]]
        if not others:
            words = found.codewords.double()
            alike = torch.nn.functional.cosine_similarity(words, words[primary[positive]].unsqueeze(0))
            alike[[primary[positive], 3]] = -2
            others = [j for j in range(16) if primary[j] == int(alike.argmax())]
        sets = list(itertools.combinations(others, 2))
        counts = torch.tensor([sum(sorted(row) == sorted(chosen) for row in rows) for chosen in sets])
        assert int(counts.sum()) == len(rows)
        assert chi_square(counts, torch.ones(len(sets))) > 1e-4


def test_where_there_is_nothing_to_draw() -> None:
    """With one other cluster the second draw is empty: id -1, item 0 to encode, weight -inf, no cell, no cluster."""
    found = Codes(torch.tensor([0, 2, 0, 2]), torch.zeros(4).long(), vectors(3, 2), 1)
    sampler = OtherClusters(found, 2, 2).to(DEVICE)
    tables = sampler.cell, sampler.order, sampler.start, sampler.chance
    (ids, real, log_w, cells, _), clusters = cluster_draws.others(
        torch.tensor([0, 1], device=DEVICE), *tables, 1, 2, 2, seed(0, 1)
    )
    assert sorted(ids[0].tolist()) == [-1, -1, 1, 3]
    assert clusters.tolist() == [[2, -1], [0, -1]]
    for row in (0, 1):
        assert ids[row, 2:].tolist() == cells[row, 2:].tolist() == [-1, -1]
        assert real[row, 2:].tolist() == [0, 0]
        assert log_w[row].tolist() == [0.0, 0.0, -math.inf, -math.inf]
    alone = Codes(torch.tensor([0, 0]), torch.zeros(2).long(), vectors(2, 2), 1)
    same = SameCluster(alone, 2).to(DEVICE)
    ids, *_ = cluster_draws.same(torch.tensor([1], device=DEVICE), same.cell, same.order, same.pool, 1, 2, seed(0))
    assert ids.tolist() == [[-1, -1]]


def loss_by_hand(step: Step, bag: Bag, found: Codes, exclude: str, offset: float) -> Tensor:
    """(B,) float64, from the vectors of the bag; exclusions are checked pair by pair."""
    simple, hard = bag.blocks
    assert simple.mix is not None
    share, ids, own = simple.mix.weights.double(), simple.ids.tolist(), step.item_ids.tolist()
    made = torch.einsum("gvm,gmd->gvd", share, simple.emb.double().unflatten(0, share.shape[::2])).flatten(0, 1)
    cell, primary, v, m = found.cell_of.tolist(), found.primary.tolist(), *share.shape[1:]
    drops = {"cell": lambda i, j: cell[i] == cell[j], "positive": lambda i, j: i == j, "none": lambda i, j: False}[
        exclude
    ]
    real_mask = torch.tensor([[drops(i, j) for j in ids] for i in own])
    made_mask = torch.tensor(
        [[exclude != "none" and primary[i] == primary[j] for j in ids[::m] for _ in range(v)] for i in own]
    )
    assert exclude == "none" or bool(real_mask.any() and made_mask.any())
    q = step.q.double() / step.tau.double()
    terms = [
        (q * step.v.double()).sum(1, keepdim=True),
        (q @ simple.emb.double().T).masked_fill(real_mask.to(DEVICE), -math.inf),
        (q @ made.T + offset).masked_fill(made_mask.to(DEVICE), -math.inf),
        (q.unsqueeze(1) * hard.emb.double()).sum(-1),
    ]
    return torch.logsumexp(torch.cat(terms, 1), 1) - terms[0].squeeze(1)


def with_bias(step: Step, table: Tensor) -> Step:
    """The step of a model with a large bias of every item: its item vectors end in it, its queries in 1."""
    items = torch.cat([table.detach(), 5 * vectors(len(table), 1, start=9).to(DEVICE)], 1)
    q = torch.cat([step.q, torch.ones_like(step.q[:, :1])], 1)
    generator = torch.Generator(DEVICE).manual_seed(1)
    encode = items.__getitem__
    return replace(step, q=q, v=items[step.item_ids], encode=encode, generator=generator, biased=True)


@pytest.mark.parametrize(("exclude", "rule"), [("cell", 0.2), ("positive", "learned"), ("none", "adaptive")])
def test_a_step_by_these_kernels(monkeypatch: pytest.MonkeyPatch, exclude: str, rule: float | str) -> None:
    """Loss and gradients of a bag drawn and scored as on a GPU equal those of its vectors in float64."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found, offset = codes(), -0.3
    other = OtherClusters(found, 2, 4, exclude=exclude)  # type: ignore[arg-type]
    hard = TowardsPositive(SameCluster(found, 3, exclude=exclude), rule)  # type: ignore[arg-type]
    negatives = Union(Interpolated(other, offset=offset), hard).to(DEVICE)
    q, table = (vectors(n, 4, start=n).to(DEVICE).requires_grad_() for n in (6, 16))
    items = torch.tensor([0, 3, 3, 7, 11, 15], device=DEVICE)

    def drawn(start: int) -> tuple[Step, Bag]:
        generator = torch.Generator(DEVICE).manual_seed(start)
        tau = torch.tensor(0.5, device=DEVICE)
        step = Step(torch.arange(6, device=DEVICE), items, q, table[items], tau, lambda ids: table[ids], generator)
        return step, negatives(step)

    step, bag = drawn(1)
    (simple, _), (same, _) = bag.blocks, negatives(with_bias(drawn(1)[0], table)).blocks
    torch.testing.assert_close(same.mix.weights, simple.mix.weights)  # type: ignore[union-attr]  # no bias in equation 11
    found_loss = sampled_softmax(step, bag)
    exact = loss_by_hand(step, bag, found, exclude, offset)
    torch.testing.assert_close(found_loss.double(), exact, rtol=1e-4, atol=1e-5)
    upstream = torch.linspace(0.5, 1.5, 6, device=DEVICE)
    ours, right = (
        torch.autograd.grad((loss * upstream).sum(), [q, table], retain_graph=True) for loss in (found_loss, exact)
    )
    for one, two in zip(ours, right, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    hard_ids = bag.blocks[1].ids[:, :3].tolist()
    for i, row in zip(items.tolist(), hard_ids, strict=True):
        assert all(found.cell_of[j] != found.cell_of[i] for j in row)
    again, another = drawn(1)[1], drawn(2)[1]
    for block, same, different in zip(bag.blocks, again.blocks, another.blocks, strict=True):
        assert torch.equal(block.ids, same.ids)
        assert not torch.equal(block.ids, different.ids)
    assert torch.equal(bag.blocks[0].mix.weights, again.blocks[0].mix.weights)  # type: ignore[union-attr]
