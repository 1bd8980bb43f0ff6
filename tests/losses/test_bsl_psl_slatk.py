"""SL, BSL, PSL, SL@K and CCL against formulas written out one pair at a time in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Corpus, Exclude, Positives, Step
from sparring.losses import AdaTau, Loss, SLatK, adaptive_softmax, bsl, ccl, gbce, psl, sampled_softmax, softmax_loss
from sparring.negatives import InBatch, Resample, Sampled, Uniform
from sparring.testing import World

TAUS = [torch.tensor(0.5), torch.tensor([0.5, 1.0, 0.2, 2.0, 1.0])]
B = 5
Pairs = list[tuple[Tensor, float]]
Formula = Callable[[int, Tensor, float, float, Pairs], Tensor]


def unit(*shape: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


def case(tau: Tensor, positive: bool = True) -> tuple[Step, Bag]:
    """Unit vectors; a shared block with a mask, a per-query block with a dropped place, and a weighted positive."""
    g = torch.Generator().manual_seed(0)
    q, v = unit(B, 3, generator=g).requires_grad_(), unit(B, 3, generator=g).requires_grad_()
    step = Step(torch.tensor([3, 0, 2, 3, 1]), torch.tensor([1, 2, 3, 1, 5]), q, v, tau.double(), lambda ids: v[ids], g)
    weights = torch.randn(4, generator=g).double()
    shared = Candidates(
        torch.tensor([1, 2, 2, 9]), unit(4, 3, generator=g).requires_grad_(), weights, Exclude(step.item_ids)
    )
    own = Candidates(
        torch.arange(10).view(B, 2),
        unit(B, 2, 3, generator=g).requires_grad_(),
        torch.randn(B, 2, generator=g).double(),
    )
    own.log_w[0, 1] = -math.inf
    return step, Bag((shared, own), torch.randn(B, generator=g).double() if positive else None)


def pairs(step: Step, bag: Bag, row: int) -> Pairs:
    """(score q.e, weight) of each candidate that counts against a row."""
    found = []
    for block in bag.blocks:
        for column in range(block.ids.shape[-1]):
            item = int(block.ids[column] if block.ids.dim() == 1 else block.ids[row, column])
            vector = block.emb[column] if block.emb.dim() == 2 else block.emb[row, column]
            weight = math.exp(block.log_w[column] if block.log_w.dim() == 1 else block.log_w[row, column])
            if (block.exclude is None or item != int(step.item_ids[row])) and weight > 0:
                found.append((step.q[row] @ vector, weight))
    return found


def check(step: Step, bag: Bag, got: Tensor, formula: Formula) -> None:
    """Value and gradients equal those of formula(row, score and log weight of the positive, tau, pairs), to 1e-10."""
    log_w = [0.0] * B if bag.log_w_positive is None else bag.log_w_positive.tolist()
    want = torch.stack(
        [
            formula(row, step.q[row] @ step.v[row], log_w[row], float(step.tau.expand(B)[row]), pairs(step, bag, row))
            for row in range(B)
        ]
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    leaves = [step.q, step.v, *(block.emb for block in bag.blocks)]
    # a different weight per query, so that no two errors cancel
    scale = torch.linspace(0.5, 2.0, B, dtype=torch.float64)
    for mine, theirs in zip(
        *(torch.autograd.grad((scale * loss).sum(), leaves, allow_unused=True) for loss in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


SIGMA: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda d: 1 + torch.tanh(d),
    "atan": lambda d: 1 + torch.atan(d),
    "relu": lambda d: torch.clamp(1 + d, min=0),
}


def total(found: Pairs, term: Callable[[Tensor], Tensor]) -> Tensor:
    return sum(w * term(s) for s, w in found)  # type: ignore[return-value]


def sl_formula(row: int, own: Tensor, log_w: float, tau: float, found: Pairs) -> Tensor:
    """The positive is not in the sum."""
    return torch.log(total(found, lambda s: ((s - own) / tau).exp())) - log_w


def bsl_formula(row: int, own: Tensor, log_w: float, tau_2: float, found: Pairs) -> Tensor:
    """With tau_2 the step's tau and tau_1 = tau_2 / exponent."""
    tau_1 = tau_2 / 1.3
    return -torch.log((own / tau_1).exp() / total(found, lambda s: (s / tau_2).exp()) ** (tau_2 / tau_1)) - 1.3 * log_w


def bsl_release_formula(row: int, own: Tensor, log_w: float, tau: float, found: Pairs) -> Tensor:
    """The positive's temperature stays the step's."""
    return -torch.log((own / tau).exp() / total(found, lambda s: (s / tau).exp()) ** 1.22) - log_w


def psl_formula(surrogate: str) -> Formula:
    """d = cos_j / 2 - cos_+ / 2; the positive's weight is ignored."""

    def formula(row: int, own: Tensor, log_w: float, tau: float, found: Pairs) -> Tensor:
        return torch.log(total(found, lambda s: SIGMA[surrogate](s / 2 - own / 2) ** (1 / tau)))

    return formula


def ccl_formula(margin: float, weight: float) -> Formula:
    """The mean over all candidates that count, weighted by w_j; tau and the positive's weight are ignored."""

    def formula(row: int, own: Tensor, log_w: float, tau: float, found: Pairs) -> Tensor:
        excess = total(found, lambda s: torch.clamp(s - margin, min=0))
        return (1 - own) + weight * excess / sum(w for _, w in found)

    return formula


def gbce_formula(n_items: int, t: float, b: float = 0.0) -> Formula:
    """The paper's beta, written as it stands there, and scores plus b; the positive's weight is ignored."""

    def formula(row: int, own: Tensor, log_w: float, tau: float, found: Pairs) -> Tensor:
        n = sum(w for _, w in found)
        alpha = min(n / (n_items - 1), 1.0)
        beta = alpha * (t * (1 - 1 / alpha) + 1 / alpha)
        negatives = total(found, lambda s: torch.log(1 - torch.sigmoid(s / tau + b)))
        return -(beta * torch.log(torch.sigmoid(own / tau + b)) + negatives) / (1 + n)

    return formula


FORMULAS: dict[str, tuple[Loss, Formula]] = {
    "log sum_j w_j exp((s_j - s_+) / tau)": (softmax_loss, sl_formula),
    "-log(exp(s_+ / tau_1) / (sum_j w_j exp(s_j / tau_2))^(tau_2 / tau_1))": (bsl(1.3), bsl_formula),
    "-log(exp(s_+ / tau) / (sum_j w_j exp(s_j / tau))^exponent)": (bsl(1.22, "release"), bsl_release_formula),
    "log sum_j w_j (1 + tanh d_j)^(1 / tau)": (psl("tanh"), psl_formula("tanh")),
    "log sum_j w_j (1 + atan d_j)^(1 / tau)": (psl("atan"), psl_formula("atan")),
    "log sum_j w_j max(0, 1 + d_j)^(1 / tau)": (psl("relu"), psl_formula("relu")),
    "(1 - s_+) + 3 mean_j max(0, s_j - 0.1)": (ccl(0.1, 3.0), ccl_formula(0.1, 3.0)),
    "(1 - s_+) + 150 mean_j max(0, s_j + 0.4)": (ccl(-0.4, 150.0), ccl_formula(-0.4, 150.0)),
    "BCE, the positive's part times beta, t = 0.75": (gbce(40, 0.75), gbce_formula(40, 0.75)),
    "BCE, the positive's part times beta, t = 1": (gbce(40, 1.0), gbce_formula(40, 1.0)),
    "BCE": (gbce(40, 0.0), gbce_formula(40, 0.0)),
    "BCE and the best constant, t = 1": (gbce(40, 1.0, 13), gbce_formula(40, 1.0, -math.log(39))),
    "BCE and the best constant, t = 0": (gbce(40, 0.0, 13), gbce_formula(40, 0.0, -math.log(13))),
}


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_is_its_formula(name: str, tau: Tensor, positive: bool) -> None:
    """Each loss and its gradients equal the formula, with and without a weight of the positive."""
    step, bag = case(tau, positive)
    loss, formula = FORMULAS[name]
    check(step, bag, loss(step, bag), formula)


WRONG: dict[str, Loss] = {
    "positive in the sum": sampled_softmax,
    "exponent on the wrong side": bsl(1 / 1.3),
    "whole cosines": lambda step, bag: psl("tanh")(replace(step, q=2 * step.q), bag),
    "divided by the temperature": lambda step, bag: ccl(0.1, 3.0)(replace(step, q=step.scaled), bag),
    "sum instead of mean": ccl(0.1, 18.0),
    "sampling rate of another catalogue": gbce(20, 0.75),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_every_other_loss_is_rejected(name: str) -> None:
    """No formula accepts a wrong loss or the loss of another formula."""
    formula = FORMULAS[name][1]
    others = {other: loss for other, (loss, _) in FORMULAS.items() if other != name}
    for loss in (WRONG | others).values():
        step, bag = case(TAUS[1])
        with pytest.raises(AssertionError):
            check(step, bag, loss(step, bag), formula)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("surrogate", sorted(SIGMA))
def test_psl_of_a_learned_temperature_and_learned_weights(tau: Tensor, surrogate: str) -> None:
    """The gradients with respect to tau and the weights equal those of the formula and finite differences."""
    step, bag = case(tau)
    block = bag.blocks[1]

    def loss(tau: Tensor, log_w: Tensor) -> Tensor:
        at = Step(step.query_ids, step.item_ids, step.q.detach(), step.v.detach(), tau, step.encode, step.generator)
        return psl(surrogate)(at, Bag((Candidates(block.ids, block.emb.detach(), log_w),)))  # type: ignore[arg-type]

    weights = torch.linspace(-1, 1, 10, dtype=torch.float64).view(B, 2)
    assert torch.autograd.gradcheck(loss, (step.tau.clone().requires_grad_(), weights.requires_grad_()))


@pytest.mark.parametrize("surrogate", sorted(SIGMA))
@pytest.mark.parametrize("tau", [0.005, 0.05])
def test_psl_is_finite_in_single_precision(surrogate: str, tau: float) -> None:
    """Everything is finite at the smallest temperatures and where sigma is 0 or would be negative."""
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    step = Step(
        torch.arange(2),
        torch.arange(2),
        q,
        q.detach().clone(),
        torch.tensor(tau),
        lambda ids: q[ids],
        torch.Generator(),
    )
    bag = Bag(
        (Candidates(torch.tensor([5, 6, 7]), torch.tensor([[-1.0, 0.0], [0.6, 0.8], [-4.0, -4.0]]), torch.zeros(())),)
    )
    loss = psl(surrogate)(step, bag)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss.sum(), q)
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(gradient).all())
    want = [
        math.log(float(SIGMA[surrogate](torch.tensor(d / 2, dtype=torch.float64)))) / tau for d in (0.6 - 1, 0.8 - 1)
    ]
    torch.testing.assert_close(
        loss.detach(), torch.tensor(want), rtol=1e-3, atol=1e-3
    )  # only the nearer candidate counts


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("constant", [False, True])
def test_slatk(tau: Tensor, constant: bool) -> None:
    """sigmoid((s_+ - beta_u) / tau_w) log sum_j w_j exp((s_j - s_+) / tau), with gradient through the sigmoid."""
    step, bag = case(tau, positive=False)
    beta = [0.3, -0.2, 0.7, 0.1]

    def loss(constant: bool) -> Tensor:
        slatk = SLatK(4, k=2, n=10, tau_w=0.3, constant_weight=constant).double()
        slatk.beta.copy_(torch.tensor(beta, dtype=torch.float64))
        return slatk(step, bag)  # type: ignore[no-any-return]

    def formula(row: int, own: Tensor, log_w: float, tau: float, found: Pairs) -> Tensor:
        weight = 1 / (1 + torch.exp(-(own - beta[int(step.query_ids[row])]) / 0.3))
        weight = weight.detach() if constant else weight
        return weight * sl_formula(row, own, log_w, tau, found)

    check(step, bag, loss(constant), formula)
    with pytest.raises(AssertionError):
        check(step, bag, loss(not constant), formula)


def corpus_of(n_queries: int, n_items: int, epoch: int, seed: int = 0) -> tuple[Corpus, Tensor, list[list[int]]]:
    """A catalogue, query vectors and the positives of each query, from none to more than every k here."""
    g = torch.Generator().manual_seed(seed)
    items, queries = unit(n_items, 4, generator=g).float(), unit(n_queries, 4, generator=g).float()
    lists = [sorted(torch.randperm(n_items, generator=g)[: (3 * u) % 14].tolist()) for u in range(n_queries)]
    start = torch.tensor([0, *(len(own) for own in lists)]).cumsum(0)
    positives = Positives(start, torch.tensor([item for own in lists for item in own]))
    return Corpus(epoch, items, lambda ids: queries[ids], positives, g), queries, lists


@pytest.mark.parametrize("k", [1, 3, 10])
def test_thresholds_are_exact_with_the_whole_catalogue(k: int) -> None:
    """With n = N the threshold of a query is the k-th largest of its scores with all items, each counted once."""
    corpus, queries, _ = corpus_of(17, 20, 0)
    loss = SLatK(17, k=k, n=20)
    loss.refresh(corpus)
    want = (queries @ corpus.items.T).sort(1, descending=True).values[:, k - 1]
    torch.testing.assert_close(loss.beta, want)


def test_thresholds_take_all_positives_and_the_drawn_items() -> None:
    """With n < N the threshold is the k-th largest among the query's positives and n shared items, none twice."""
    corpus, queries, lists = corpus_of(17, 14, 0)
    loss, n, k = SLatK(17, k=3, n=5), 5, 3
    loss.refresh(corpus)
    scores = (queries @ corpus.items.T).tolist()

    def expected(drawn: set[int]) -> list[float]:
        return [sorted((scores[u][j] for j in drawn | set(lists[u])), reverse=True)[k - 1] for u in range(17)]

    # some set of five drawn items must explain all thresholds (query 0 has no positives, so its threshold is among
    # them)
    at = [min(range(14), key=lambda j, u=u: abs(scores[u][j] - float(loss.beta[u]))) for u in range(17)]  # type: ignore[misc]
    assert all(abs(scores[u][j] - float(loss.beta[u])) < 1e-6 for u, j in enumerate(at))
    fits = [
        drawn
        for drawn in map(set, itertools.combinations(range(14), n))
        if at[0] in drawn and close(expected(drawn), loss.beta)
    ]
    assert fits


def close(values: list[float], found: Tensor) -> bool:
    return bool((torch.tensor(values) - found).abs().max() < 1e-6)


def test_thresholds_are_drawn_anew_every_so_many_epochs() -> None:
    """every=3 redraws the thresholds before epochs 0, 3 and 6 only; the first draw replaces weight 1 for all."""
    loss = SLatK(17, k=2, n=5, every=3)
    assert bool(torch.isneginf(loss.beta).all())
    before = loss.beta.clone()
    for epoch in range(7):
        loss.refresh(corpus_of(17, 20, epoch, seed=epoch)[0])
        assert torch.equal(loss.beta, before) == (epoch % 3 != 0)
        before = loss.beta.clone()


def test_slatk_before_any_threshold_is_the_softmax_loss() -> None:
    """Before the first refresh every weight is 1, with finite gradients."""
    step, bag = case(TAUS[0])
    loss, plain = SLatK(4, k=2, n=5)(step, bag), softmax_loss(step, bag)
    torch.testing.assert_close(loss, plain)
    for mine, theirs in zip(*(torch.autograd.grad(x.sum(), [step.q, step.v]) for x in (loss, plain)), strict=True):
        torch.testing.assert_close(mine, theirs)


def every_loss(n_queries: int) -> list[Loss]:
    slatk = SLatK(n_queries, k=1, n=5)
    slatk.beta.fill_(0.2)
    ada = adaptive_softmax(AdaTau(torch.ones(n_queries), 100))
    return [softmax_loss, bsl(1.2), bsl(1.2, "release"), psl("tanh"), psl("atan"), psl("relu"), slatk, ada]


@pytest.mark.parametrize("which", range(8))
def test_nothing_left(which: int) -> None:
    """A query whose every candidate is masked or dropped has loss 0 and gradient 0; the others are finite."""
    world = World.build()
    step = world.step(4, 1)
    loss = every_loss(1 + int(step.query_ids.max()))[which]
    ids = step.item_ids[:1].repeat(3)
    block = Candidates(ids, world.items[ids], torch.zeros(()), Exclude(step.item_ids))
    same = step.item_ids == step.item_ids[0]
    for bag in (Bag((block,)), Bag((block, block))):
        value = loss(step, bag)
        (gradient,) = torch.autograd.grad(value.sum(), step.q)
        assert bool((value[same] == 0).all())
        assert bool((gradient[same] == 0).all())
        assert bool(torch.isfinite(value).all())
        assert bool(torch.isfinite(gradient).all())
        assert bool((value[~same] != 0).all())


def test_ccl_with_nothing_left_keeps_the_positive() -> None:
    """Positive and negatives do not compete: with everything excluded 1 - y_+ remains."""
    step, bag = case(TAUS[0])
    block = bag.blocks[0]
    empty = Bag((Candidates(block.ids, block.emb, torch.full((4,), -math.inf)),))
    torch.testing.assert_close(ccl()(step, empty), 1 - (step.q * step.v).sum(1))


def test_gbce_with_nothing_left_keeps_the_positive() -> None:
    """With everything excluded nothing was sampled: alpha = 0, and (1 - t) log(1 + exp(-s_+)) remains."""
    step, bag = case(TAUS[0])
    block = bag.blocks[0]
    empty = Bag((Candidates(block.ids, block.emb, torch.full((4,), -math.inf)),))
    expected = 0.25 * torch.log1p((-(step.q * step.v).sum(1) / 0.5).exp())
    torch.testing.assert_close(gbce(40)(step, empty), expected)


def test_gbce_of_weights_that_stand_for_the_catalogue_is_bce() -> None:
    """Draws weighted to the sum over all items have sampling rate 1 and not more: t changes nothing."""
    step, bag = case(TAUS[0])
    block = bag.blocks[1]
    heavy = Bag((Candidates(block.ids, block.emb, torch.full((B, 2), math.log(25.0), dtype=torch.float64)),))
    torch.testing.assert_close(gbce(40, 0.75)(step, heavy), gbce(40, 0.0)(step, heavy))


@pytest.mark.parametrize(("t", "probability"), [(1.0, 1 / 101), (0.0, 1 / 6)])
def test_gbce_is_calibrated_at_its_optimum(t: float, probability: float) -> None:
    """The best common score of 101 items, one of them positive and 5 drawn, has sigmoid 1 / 101 with t = 1; BCE's has
    1 / 6."""
    scores = torch.linspace(-8, 8, 16_001, dtype=torch.float64).unsqueeze(1)
    one, ids = torch.ones_like(scores), torch.zeros(len(scores), dtype=torch.long)
    step = Step(ids, ids, scores, one, torch.ones((), dtype=torch.float64), lambda at: one[at], torch.Generator())
    drawn = Candidates(ids[:5], one[:5], torch.zeros(5, dtype=torch.float64))
    best = gbce(101, t)(step, Bag((drawn,))).argmin()
    assert float(torch.sigmoid(scores[best, 0])) == pytest.approx(probability, rel=1e-3)


@pytest.mark.parametrize("which", range(10))
def test_blocks_share_one_sum(which: int) -> None:
    """Splitting a block in two changes nothing."""
    world = World.build()
    step = world.step(8, 1)
    loss = [*every_loss(1 + int(step.query_ids.max())), ccl(0.1, 2.0), gbce(world.n_items)][which]
    (whole,) = Sampled(Uniform(world.n_items), 30)(step).blocks
    halves = tuple(
        Candidates(whole.ids[at], whole.emb[at], whole.log_w[at], whole.exclude) for at in (slice(0, 11), slice(11, 30))
    )
    torch.testing.assert_close(loss(step, Bag((whole,))), loss(step, Bag(halves)))


def test_expected_draws() -> None:
    """A softmax-type loss accepts the closed form of Resample; a pairwise loss raises an error."""
    world = World.build()
    step = world.step(8, 1)
    bag = Resample(InBatch())(step)
    assert bool(torch.isfinite(softmax_loss(step, bag)).all())
    for loss in (psl(), ccl(), gbce(9)):
        with pytest.raises(ValueError, match="multinomial"):
            loss(step, bag)


def test_what_is_refused() -> None:
    """Invalid arguments are named."""
    for make in (
        lambda: bsl(0.0),
        lambda: bsl(1.0, "multi"),  # type: ignore[arg-type]
        lambda: psl("exp"),  # type: ignore[arg-type]
        lambda: ccl(weight=-1.0),
        lambda: gbce(1),
        lambda: gbce(9, calibration=1.5),
        lambda: gbce(9, drawn=0),
        lambda: SLatK(3, k=0),
        lambda: SLatK(3, k=20, n=10),
        lambda: SLatK(3, every=0),
        lambda: SLatK(3, tau_w=0.0),
    ):
        with pytest.raises(ValueError, match=r"exponent|form|surrogate|weight|SL@K|gBCE"):
            make()
