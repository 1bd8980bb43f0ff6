"""Known bugs, ready to be injected again: a line of the source, what it becomes, and the tests that must notice.

A mutant swaps the code object of one function for the same function with one piece of text replaced, so that every module that has
imported it runs the mutant. When the source changes so that the piece is gone, applying the mutant fails loudly: give it a new one.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

import clusters.test_balanced as balanced_tests
import data.test_clustered as clustered_tests
import negatives.test_algebra as algebra_tests
import negatives.test_ance as ance_tests
import negatives.test_batch as batch_tests
import negatives.test_buckets as bucket_tests
import negatives.test_cache as cache_tests
import negatives.test_cluster_counts as count_tests
import negatives.test_clusters as cluster_tests
import negatives.test_corrections as correction_tests
import negatives.test_distributions as distribution_tests
import negatives.test_edis as edis_tests
import negatives.test_fair as fair_tests
import negatives.test_hard as hard_tests
import negatives.test_midx as midx_tests
import negatives.test_published as published_tests
import negatives.test_sampled as sampled_tests
import negatives.test_synthetic as synthetic_tests
import test_augmented
import test_dropout
import test_grad_cache
import test_kernels
import test_kernels_mixed
import test_losses
import test_losses_mined
import test_losses_newer
import test_recipes_extreme
import test_settings
import test_sharded
import test_temperature
import test_tree
import test_types
from sparring import augmented, contrast, losses, retriever, settings, sharded, tree, types
from sparring.clusters import balanced
from sparring.data import batches
from sparring.data.splits import split
from sparring.data.worlds import make_world
from sparring.kernels import chunked, reference
from sparring.kernels import mixed as mixed_kernel
from sparring.losses import mined
from sparring.negatives import (
    algebra,
    ance,
    batch,
    buckets,
    clusters,
    corpus,
    distributions,
    edis,
    fair,
    inclusion,
    midx,
    selection,
    synthetic,
)
from sparring.recipes import in_batch as in_batch_recipes
from sparring.testing import World


@dataclass(frozen=True)
class Mutant:
    """One bug: in `function`, `old` becomes `new`; at least one of `tests` must then fail."""

    name: str
    function: Callable[..., Any]
    old: str
    new: str
    tests: tuple[Callable[[], None], ...]

    @contextmanager
    def injected(self) -> Iterator[None]:
        function = self.function
        assert isinstance(function, FunctionType)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) >= 1, f"mutant {self.name!r} no longer applies: {self.old!r} is not in {function.__qualname__}"
        # inside a class, so that super() finds its cell; deferred annotations, as in the source
        text = "class Holder:\n" + textwrap.indent(source.replace(self.old, self.new, 1), "    ")
        scope = dict(function.__globals__)
        exec(compile(text, function.__code__.co_filename, "exec", __future__.annotations.compiler_flag), scope)
        original, mutated = function.__code__, getattr(scope["Holder"], function.__name__).__code__
        assert original.co_freevars == mutated.co_freevars
        function.__code__ = mutated
        try:
            yield
        finally:
            function.__code__ = original


def of(contract: type, test: str) -> Callable[[], None]:
    """A method of a contract as a function without arguments."""

    def run() -> None:
        getattr(contract(), test)()

    run.__name__ = f"{contract.__name__}.{test}"
    return run


def calling(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A parametrised test with its arguments."""

    def run() -> None:
        test(*arguments)

    run.__name__ = f"{test.__name__}{arguments}"
    return run


def published(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return calling(test, World.build(n_items=20), *arguments)


def on_parts(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A test that takes the parts of a small world last."""

    def run() -> None:
        world = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3)
        test(*arguments, split(world.interactions, "random", valid=0.1, test=0.2, seed=1))

    run.__name__ = f"{test.__name__}{arguments}"
    return run


def cached(tower: str, source: str) -> Callable[[], None]:
    """The gradient cache against the direct gradient on a small world."""

    def run() -> None:
        world = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3)
        parts = split(world.interactions, "random", valid=0.1, test=0.2, seed=1)
        test_grad_cache.same_gradients(parts, tower, source, 4)

    run.__name__ = f"same_gradients({tower}, {source})"
    return run


PLAIN_TAU = test_losses.torch.tensor(0.5)
PARTITION, EXCLUDED, DISTRIBUTION = "test_partition_function", "test_excluded_items_weigh_nothing", "test_distribution"
GRADIENT, DESCRIBES = "test_loss_and_gradient", "test_bag_describes_itself"
uniform, in_batch, mixed = sampled_tests.TestUniform, batch_tests.TestInBatch, batch_tests.TestMixed


def delayed_lists(delay: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ance_tests.test_delayed_lists_are_those_of_the_vectors_then(patch, False, delay)


def centroids_by_hand() -> None:
    world = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3)
    test_augmented.test_centroids_are_means_of_the_queries_of_an_item(split(world.interactions, "random"), 1.0)


MUTANTS = [
    Mutant("the sign of logQ", algebra.corrected, "shift - log_count", "shift + log_count", (of(uniform, PARTITION),)),
    Mutant(
        "log n is missing",
        corpus.Sampled.log_count,
        "math.log(self.n) + ",
        "",
        (of(uniform, PARTITION), of(uniform, "test_log_count_is_the_formula")),
    ),
    Mutant(
        "count without log n, negatives with it",
        algebra.corrected,
        'correction in ("negatives", "both")',
        'correction not in ("negatives", "both")',
        (of(sampled_tests.TestPopularity, PARTITION), calling(correction_tests.test_negatives_saturates, 4)),
    ),
    Mutant(
        "both leaves the positive uncorrected",
        algebra.corrected,
        "positive = log_size - own_count",
        "positive = torch.zeros_like(step.q[:, 0])",
        (published(published_tests.test_ssl_pop), correction_tests.test_both_starves_the_tail),
    ),
    Mutant(
        "refined with the wrong sign",
        algebra.corrected,
        "torch.log1p(-",
        "torch.log1p(+",
        (correction_tests.test_refined_is_the_published_form,),
    ),
    Mutant(
        "in-batch counts its own column",
        batch.InBatch.size,
        "- 1",
        "+ 0",
        (of(in_batch, "test_log_count_is_the_formula"), of(in_batch, "test_own_column_never_counts")),
    ),
    Mutant(
        "exclusion that does nothing",
        types.Exclude._hits,
        "torch.searchsorted(ordered, self.ids, right=True) - low",
        "torch.searchsorted(ordered, self.ids, right=True) * 0",
        (of(in_batch, GRADIENT), calling(test_losses.test_nothing_left, losses.sampled_softmax)),
    ),
    Mutant(
        "exclusion by a tiny number instead of -inf",
        chunked._Blocks.block,
        "[begin:end]] = -math.inf",
        "[begin:end]] += 1e-40",
        (of(in_batch, GRADIENT), of(uniform, "test_everything_excluded")),
    ),
    Mutant(
        "exclusion finds one of several duplicates",
        types.Exclude._hits,
        "torch.searchsorted(ordered, self.ids, right=True) - low",
        "(torch.searchsorted(ordered, self.ids, right=True) - low).clamp(max=1)",
        (test_types.test_own_positive_among_shared_candidates, of(in_batch, GRADIENT)),
    ),
    Mutant(
        "an empty place is looked up as item 0",
        types.Known.mask,
        "torch.where(ids < 0, last, ids.clamp(max=last))",
        "ids.clamp(min=0, max=last)",
        (calling(test_types.test_known_positives_are_looked_up_as_they_are_listed, 1 << 26),),
    ),
    Mutant(
        "known items are told from the candidates by the wrong bits",
        types.Known.hits,
        "among[own & last]",
        "among[(own >> 1) & last]",
        (calling(test_types.test_known_positives_are_looked_up_as_they_are_listed, 0),),
    ),
    Mutant(
        "a query offers each of its positives once an epoch",
        in_batch_recipes.offered,
        "share / total[data.queries]",
        "share",
        (on_parts(test_recipes_extreme.test_every_correction_is_by_what_batches_offer, "ssl_pop", "uniform"),),
    ),
    Mutant(
        "a base setup takes from a recipe what makes it",
        settings._kept,
        "dataclasses.replace(base, **made)",
        "base",
        (on_parts(test_settings.test_a_base_setup_leaves_a_recipe_what_makes_it),),
    ),
    Mutant(
        "known positives without the last of each query",
        types.Known._listed,
        "start[self.query_ids + 1] - start[self.query_ids]",
        "(start[self.query_ids + 1] - start[self.query_ids] - 1).clamp(min=0)",
        (of(sampled_tests.TestKnownPositives, EXCLUDED), test_types.test_positives_of_queries),
    ),
    Mutant(
        "known positives treated as the own positive only",
        algebra.exclusion,
        "step.positives.of(step.query_ids)",
        "Exclude(step.item_ids)",
        (of(sampled_tests.TestKnownPositives, EXCLUDED),),
    ),
    Mutant(
        "swapped weights of a mixture",
        algebra.Union.log_count,
        "source.log_count(ids, step) for source in self.sources",
        "source.log_count(ids, step) - math.log(source.size(step)) + math.log(other.size(step)) "
        "for source, other in zip(self.sources, reversed(self.sources))",
        (of(mixed, PARTITION), of(mixed, "test_log_count_is_the_formula")),
    ),
    Mutant(
        "a mixture weighs each source by itself",
        algebra.Union.log_count,
        "torch.logsumexp(torch.stack(counts), 0)",
        "counts[0]",
        (of(mixed, PARTITION),),
    ),
    Mutant(
        "occurrence counted once for each distinct item",
        batch.Cache._drawn,
        "step.batch.sum(block.usage) if",
        "step.batch.sum((block.usage > 0).double()) if",
        (cache_tests.test_occurrences_add_up_over_all_draws_of_all_terms,),
    ),
    Mutant(
        "occurrences of the first term only",
        batch.Cache._drawn,
        "for bag in outcome.bags ",
        "for bag in outcome.bags[:1] ",
        (cache_tests.test_occurrences_add_up_over_all_draws_of_all_terms,),
    ),
    Mutant(
        "the cache draws from everything, whatever the pool",
        batch.Cache.observe,
        'self.pool == "all"',
        "True",
        (cache_tests.test_the_release_draws_only_from_this_steps_items,),
    ),
    Mutant(
        "occurrences in single precision",
        batch.Cache.observe,
        "self.occurrences.index_add_(0, ids, usage)",
        "self.occurrences.copy_(self.occurrences.float().index_add_(0, ids, usage.float()))",
        (cache_tests.test_large_counts_still_register_small_additions,),
    ),
    Mutant(
        "the positive counted twice",
        losses.sampled_softmax,
        "return ",
        "return 0.69 + ",
        (
            calling(test_losses.test_sampled_softmax, test_losses.torch.tensor(0.5)),
            of(sampled_tests.TestAllItems, "test_is_the_full_softmax"),
        ),
    ),
    Mutant(
        "a gradient through the weights of the draw",
        reference.weighted_logsumexp,
        "with torch.no_grad():",
        "if True:",
        (calling(test_kernels.test_error_budget_of_expected_draws, "reference", (33, 57, 13), "column", "some"),),
    ),
    Mutant(
        "expected counts are not squared",
        chunked._WeightedLogSumExp.forward,
        "part_total = part.square_() @ scale",
        "part_total = part @ scale",
        (
            algebra_tests.test_closed_form_gradient_is_softmax_of_twice_the_score,
            published(published_tests.test_bir_in_closed_form, "count"),
        ),
    ),
    Mutant(
        "resampling forgets the correction",
        algebra.Resample.forward,
        "scores = scores + reference.drop(block.log_w, scores.shape, places)",
        "scores = scores + reference.drop(0 * block.log_w, scores.shape, places)",
        (of(algebra_tests.TestMultinomial, DISTRIBUTION), of(algebra_tests.TestResampleUnion, DISTRIBUTION)),
    ),
    Mutant(
        "resampling without log n",
        algebra.Resample.forward,
        "log_w = (counts - 1).log1p_()",
        "log_w = (counts > 0).log()",
        (of(algebra_tests.TestMultinomial, DISTRIBUTION), published(published_tests.test_bir, "multinomial")),
    ),
    Mutant(
        "systematic draws off by one",
        algebra.systematic_counts,
        "torch.floor(cdf * n + start)",
        "torch.ceil(cdf * n + start)",
        (calling(algebra_tests.test_systematic_counts, 7),),
    ),
    Mutant(
        "systematic draws without a random start",
        algebra.systematic_counts,
        "torch.floor(cdf * n + start)",
        "torch.floor(cdf * n)",
        (calling(algebra_tests.test_systematic_counts, 7),),
    ),
    Mutant(
        "rounded draws always rounded down",
        algebra.rounded_counts,
        "torch.floor(p * n + _uniform(len(p), p.shape[1], generator, batch))",
        "torch.floor(p * n)",
        (calling(algebra_tests.test_rounded_counts, 7),),
    ),
    Mutant(
        "the hardest are the easiest",
        selection.Hardest.choose,
        "scores.topk(min(self.k, scores.shape[1]), dim=1)",
        "scores.topk(min(self.k, scores.shape[1]), dim=1, largest=False)",
        (of(algebra_tests.TestHardest, DISTRIBUTION), of(algebra_tests.TestHardestPerQuery, "test_no_draw_scores_higher")),
    ),
    Mutant(
        "the memory is last in, first out",
        batch.Memory.observe,
        "(self.cursor + torch.arange(len(new), device=new.device))",
        "(self.cursor * 0 + torch.arange(len(new), device=new.device))",
        (calling(batch_tests.TestMemory().test_first_in_first_out, 10, 4),),
    ),
    Mutant(
        "the memory keeps the first of a long batch",
        batch.Memory.observe,
        "step.batch.item_ids[-len(self.ids) :]",
        "step.batch.item_ids[: len(self.ids)]",
        (calling(batch_tests.TestMemory().test_first_in_first_out, 7, 16),),
    ),
    Mutant(
        "the memory skips its warm-up",
        batch.Memory.observe,
        "self.steps > self.warmup",
        "self.steps > 0",
        (of(batch_tests.TestMemory, "test_warm_up"),),
    ),
    Mutant(
        "forward writes state",
        batch.Memory.forward,
        "block = ",
        "self.steps += 1; block = ",
        (of(batch_tests.TestMemory, "test_forward_leaves_state_alone"),),
    ),
    Mutant(
        "streaming takes the shortest gap",
        distributions.Streaming.log_prob,
        ".amax(-1)",
        ".amin(-1)",
        (
            distribution_tests.test_streaming_takes_the_longest_gap,
            calling(distribution_tests.test_streaming_against_a_plain_loop, (7, 11, 13)),
        ),
    ),
    Mutant(
        "streaming forgets when an item was last seen",
        distributions.Streaming.observe,
        "self.last[at] = self.time",
        "pass",
        (distribution_tests.test_streaming_finds_the_period,),
    ),
    Mutant(
        "popularity without its power",
        distributions.Popularity.__init__,
        "counts**alpha",
        "counts",
        (of(sampled_tests.TestFlattenedPopularity, DISTRIBUTION),),
    ),
    Mutant(
        "draws from a cumulative sum that hit steps of zero",
        distributions.draw_from_cdf,
        "torch.searchsorted(cdf, u, right=True)",
        "(torch.searchsorted(cdf, u, right=True) - 1).clamp(min=0)",
        (of(sampled_tests.TestPopularity, DISTRIBUTION),),
    ),
    Mutant(
        "shown items from the list of the next query",
        corpus.Shown.forward,
        "begin = self.start[step.query_ids]",
        "begin = self.start[(step.query_ids + 1).clamp(max=len(self.start) - 2)]",
        (of(sampled_tests.TestShown, DISTRIBUTION),),
    ),
    Mutant(
        "a bag that calls its own candidates shared",
        types.Bag.describe,
        "if block.shared else",
        "if not block.shared else",
        (of(uniform, DESCRIBES), test_types.test_a_bag_says_what_it_holds),
    ),
    Mutant(
        "a bag that forgets to say what is masked",
        types._masked,
        "block.exclude is None",
        "True",
        (of(uniform, DESCRIBES),),
    ),
    Mutant(
        "the temperature divides only the positive",
        losses.softmax._logsumexp,
        "step.scaled",
        "step.q",
        (of(uniform, GRADIENT),),
    ),
    Mutant(
        "a pairwise mean that counts masked candidates",
        losses.pairwise._mean,
        "mass = mass + weights.sum(1)",
        "mass = mass + weights.shape[1]",
        (calling(test_losses.test_pairwise, losses.bpr, lambda x: test_losses.torch.log1p(x.exp())),),
    ),
    Mutant(
        "a source that answers for each query corrects the positive by another row",
        algebra.corrected,
        "log_count(step.item_ids.unsqueeze(1)).squeeze(1)",
        "log_count(step.item_ids.roll(1).unsqueeze(1)).squeeze(1)",
        (midx_tests.test_the_positive_is_corrected_by_its_own_chance,),
    ),
    Mutant(
        "the first of the hardest instead of any",
        selection.AmongHardest.choose,
        "step.batch.own(order)",
        "top.values.clone()",
        (hard_tests.test_every_one_of_the_hardest_is_as_likely,),
    ),
    Mutant(
        "masked candidates among the hardest",
        selection.AmongHardest.choose,
        "order.masked_fill_(torch.isneginf(top.values), -1.0)",
        "pass",
        (hard_tests.test_never_a_masked_one_while_others_are_left,),
    ),
    Mutant(
        "a target in scores compared with logits",
        selection.NearestTo.choose,
        " / step.tau.reshape(-1, 1)",
        "",
        (of(hard_tests.TestNearestTo, "test_every_row_by_hand"),),
    ),
    Mutant(
        "a poor positive gets an easy negative",
        selection.NearestTo.choose,
        "base.clamp(min=1e-12)",
        "base",
        (hard_tests.test_a_better_positive_gets_an_easier_negative,),
    ),
    Mutant(
        "a chosen candidate loses its weight",
        selection.Selection.forward,
        "block.log_w.expand(scores.shape).gather(1, chosen)",
        "torch.zeros(chosen.shape)",
        (of(hard_tests.TestManyKept, "test_weights_are_kept"),),
    ),
    Mutant(
        "all draws encoded for the gradient",
        selection.Selection.forward,
        "and not self.source.encodes",
        "and True",
        (calling(hard_tests.test_only_what_is_kept_is_encoded_for_the_gradient, True, 0),),
    ),
    Mutant(
        "a chosen candidate that may not count",
        selection.Selection.forward,
        "torch.isneginf(scores.gather(1, chosen))",
        "torch.isnan(weights)",
        (of(hard_tests.TestAmongHardest, "test_everything_excluded"),),
    ),
    Mutant(
        "the shares of positive and candidate swapped",
        synthetic.MixPositive.forward,
        "torch.lerp(block.emb.expand(*shape, -1), step.v.unsqueeze(1).expand(*shape, -1), a.expand(*shape, 1))",
        "torch.lerp(step.v.unsqueeze(1).expand(*shape, -1), block.emb.expand(*shape, -1), a.expand(*shape, 1))",
        (synthetic_tests.test_the_hardest_mixture_by_hand,),
    ),
    Mutant(
        "a mixture forgets what its candidate may not count against",
        synthetic.MixPositive.forward,
        "reference.drop(block.log_w, shape, places)",
        "block.log_w.expand(shape)",
        (of(synthetic_tests.TestMixPerQuery, EXCLUDED),),
    ),
    Mutant(
        "one share for all candidates, whatever was asked",
        synthetic.MixPositive.forward,
        'shape[1] if self.mix == "candidate" else 1',
        "1",
        (of(synthetic_tests.TestMixPerCandidate, "test_between_the_candidate_and_the_positive"),),
    ),
    Mutant(
        "popular items weigh more in a mixture",
        synthetic.BatchMix.forward,
        "torch.softmax(-log_q",
        "torch.softmax(log_q",
        (calling(synthetic_tests.test_mixed_logits, 1.0), synthetic_tests.test_mixture_weights_follow_their_formula_on_average),
    ),
    Mutant(
        "badly served groups are sampled more",
        fair.GroupShares.observe,
        "self.shares - self.lr * drift",
        "self.shares + self.lr * drift",
        (fair_tests.test_the_worst_served_group_is_sampled_least, calling(fair_tests.test_shares_against_a_plain_loop, 1, 0.9, 0.1)),
    ),
    Mutant(
        "a group that is not in the batch counts as served perfectly",
        fair.GroupShares.observe,
        "mean.sum() / seen.sum().clamp(min=1)",
        "mean.mean()",
        (calling(fair_tests.test_shares_against_a_plain_loop, 1, 0.9, 0.1),),
    ),
    Mutant(
        "the share of a group given to each of its items",
        fair.GroupShares.log_prob,
        "self.shares[z] / self.size[z]",
        "self.shares[z]",
        (fair_tests.test_group_then_item, of(fair_tests.TestGroupShares, PARTITION)),
    ),
    Mutant(
        "shares that do not sum to 1",
        fair.to_simplex,
        "(torch.cumsum(ordered, 0) - free)",
        "(torch.cumsum(ordered, 0) - 1)",
        (calling(fair_tests.test_projection, 0.02),),
    ),
    Mutant(
        "a tilt that counts masked candidates",
        fair.Tilted.forward,
        " - dropped.to(tilt.dtype).sum(1, keepdim=True)",
        "",
        (of(fair_tests.TestTilted, "test_every_row_by_hand"),),
    ),
    Mutant(
        "cells drawn without their size",
        midx.QuantizedSoftmax._cells,
        ".mul_(self.size_of)",
        ".mul_(self.size_of > 0)",
        (of(midx_tests.TestResidual, DISTRIBUTION),),
    ),
    Mutant(
        "a proposal that is not normalised",
        midx.QuantizedSoftmax.log_prob,
        "- total.log()",
        "",
        (calling(midx_tests.test_log_prob_is_normalised, "residual"), of(midx_tests.TestProduct, PARTITION)),
    ),
    Mutant(
        "the second book of the vectors instead of what is left over",
        midx.QuantizedSoftmax.refresh,
        "parts[1] -= self.book[0][self.code[0]]",
        "pass",
        (calling(midx_tests.test_codes_and_cells, "residual"), midx_tests.test_residual_books_are_closer_than_one),
    ),
    Mutant(
        "the nearest centre without its length",
        midx.nearest,
        "half - part @ centres.T",
        "-part @ centres.T",
        (calling(midx_tests.test_codes_and_cells, "product"), midx_tests.test_k_means_finds_separate_clumps),
    ),
    Mutant(
        "the softmax loss has the positive in its sum",
        losses.softmax.above,
        "0.0, negatives - positive)",
        "0.0, torch.logaddexp(negatives, positive) - positive)",
        (calling(test_losses_newer.test_softmax_loss, PLAIN_TAU, False),),
    ),
    Mutant(
        "a query with nothing against it has an infinite loss",
        losses.softmax.above,
        "torch.where(torch.isneginf(negatives), 0.0, negatives - positive)",
        "negatives - positive",
        (calling(test_losses_newer.test_nothing_left, 0), calling(test_losses_newer.test_nothing_left, 5)),
    ),
    Mutant(
        "BSL has one form",
        losses.softmax.bsl,
        'positive * exponent if form == "corrected" else positive',
        "positive * exponent",
        (calling(test_losses_newer.test_bsl_release, PLAIN_TAU),),
    ),
    Mutant(
        "the exponent of BSL on the wrong side",
        losses.softmax.bsl,
        "exponent * log_partition(step, bag)",
        "log_partition(step, bag) / exponent",
        (calling(test_losses_newer.test_bsl_corrected, PLAIN_TAU),),
    ),
    Mutant(
        "PSL on whole cosines",
        losses.pairwise.psl,
        "step.q / 2",
        "step.q",
        (calling(test_losses_newer.test_psl, PLAIN_TAU, "tanh"),),
    ),
    Mutant(
        "PSL with a sigma that falls below zero",
        losses.pairwise._log_sigma,
        ".clamp_(min=tiny)",
        "",
        (calling(test_losses_newer.test_psl_is_finite_in_single_precision, "relu", 0.05),),
    ),
    Mutant(
        "CCL sums where it should average",
        losses.pairwise._mean,
        "total / mass.clamp(min=torch.finfo(mass.dtype).tiny)",
        "total",
        (calling(test_losses_newer.test_ccl, 0.1, 3.0),),
    ),
    Mutant(
        "CCL divided by the temperature",
        losses.pairwise.ccl,
        "_mean(step.q, bag",
        "_mean(step.scaled, bag",
        (calling(test_losses_newer.test_ccl, 0.1, 3.0),),
    ),
    Mutant(
        "the weight of SL@K is a constant of the gradient",
        losses.SLatK.forward,
        "if self.constant_weight",
        "if True",
        (calling(test_losses_newer.test_slatk, PLAIN_TAU, False),),
    ),
    Mutant(
        "the thresholds of SL@K by place in the batch",
        losses.SLatK.forward,
        "self.beta[step.query_ids]",
        "self.beta[torch.arange(len(score)) % len(self.beta)]",
        (calling(test_losses_newer.test_slatk, PLAIN_TAU, False),),
    ),
    Mutant(
        "SL@K counts a drawn positive twice",
        losses.topk._thresholds,
        "others[known.hits(drawn)] = -math.inf",
        "pass",
        (calling(test_losses_newer.test_thresholds_are_exact_with_the_whole_catalogue, 3),),
    ),
    Mutant(
        "SL@K forgets the positives that were not drawn",
        losses.topk._thresholds,
        "kept = rank < k",
        "kept = (rank < k) & torch.isin(known.ids[order], drawn)",
        (test_losses_newer.test_thresholds_take_all_positives_and_the_drawn_items,),
    ),
    Mutant(
        "SL@K draws its thresholds before every epoch",
        losses.SLatK.refresh,
        "corpus.epoch % self.every",
        "False",
        (test_losses_newer.test_thresholds_are_drawn_anew_every_so_many_epochs,),
    ),
    Mutant(
        "a larger loss makes a smaller temperature",
        losses.AdaTau.refresh,
        "lambert_w(excess).exp()",
        "(-lambert_w(excess)).exp()",
        (calling(test_temperature.test_each_querys_temperature_follows_its_loss, None, 1.0),),
    ),
    Mutant(
        "Ada-tau keeps the loss at the query's own temperature",
        losses.AdaTau.observe,
        "tau=torch.ones_like(self.tau_0)",
        "tau=step.tau",
        (calling(test_temperature.test_each_querys_temperature_follows_its_loss, None, 1.0),),
    ),
    Mutant(
        "Ada-tau never forgets the epochs before",
        losses.AdaTau.refresh,
        "self.loss_sum.zero_()",
        "pass",
        (test_temperature.test_a_losss_memory_is_one_epoch_and_survives_an_absence,),
    ),
    Mutant(
        "Ada-tau measures all queries, the inactive too",
        losses.AdaTau._gap,
        "torch.nonzero(self.active)",
        "torch.nonzero(self.active | True)",
        (test_temperature.test_common_temperature_from_all_pairs,),
    ),
    Mutant(
        "a batch's running mean ignores the weights",
        losses.adaptive._mean_score,
        "block.log_w.exp()",
        "torch.isfinite(block.log_w).float()",
        (test_temperature.test_running_means,),
    ),
    Mutant(
        "the positive of Ada-tau at the query's temperature",
        losses.adaptive_softmax,
        "/ temperature.tau_0",
        "/ step.tau",
        (test_temperature.test_the_loss_of_adap_tau,),
    ),
    Mutant(
        "Lambert's function without its iteration",
        losses.adaptive.lambert_w,
        "range(4)",
        "range(1)",
        (test_temperature.test_lambert_w_against_scipy,),
    ),
    Mutant(
        "chunks come back in the wrong order",
        contrast.in_chunks,
        "for chunk in chunks]",
        "for chunk in reversed([*chunks])]",
        (cached("id", "sampled"),),
    ),
    Mutant(
        "a gradient cache that keeps every graph",
        contrast.in_chunks,
        "checkpoint(encode, *chunk, use_reentrant=False)",
        "encode(*chunk)",
        (test_grad_cache.test_no_call_sees_more_than_a_chunk_and_each_chunk_is_encoded_twice,),
    ),
    Mutant(
        "a gradient cache without the gradient",
        contrast.in_chunks,
        "checkpoint(encode, *chunk, use_reentrant=False)",
        "checkpoint(encode, *chunk, use_reentrant=False).detach().requires_grad_()",
        (cached("features", "in-batch"),),
    ),
    Mutant(
        "the positive counts inside its bucket",
        buckets._never,
        "items.unsqueeze(1) == step.batch.item_ids[members].unsqueeze(2)",
        "torch.zeros((*members.shape, items.shape[1]), dtype=torch.bool)",
        (of(bucket_tests.TestBuckets, EXCLUDED), calling(bucket_tests.test_it_is_the_published_loss, "positive", False)),
    ),
    Mutant(
        "the easiest bucket instead of the hardest",
        buckets._best_place,
        "best = table.max(1)",
        "best = torch.where(torch.isneginf(table), torch.inf, table).min(1)",
        (calling(bucket_tests.test_it_is_the_published_loss, "positive", False),),
    ),
    Mutant(
        "a query in no bucket gets the first",
        buckets._best_place,
        "torch.isneginf(best.values)",
        "torch.isnan(best.values)",
        (bucket_tests.test_a_query_in_no_bucket_learns_nothing,),
    ),
    Mutant(
        "buckets that encode the whole catalogue for its gradient",
        buckets.HardestBucket.forward,
        "with torch.no_grad():",
        "with torch.enable_grad():",
        (bucket_tests.test_only_items_in_a_bucket_are_encoded_for_their_gradient,),
    ),
    Mutant(
        "dropout without its scale",
        retriever.Retriever.dropped,
        " / (1 - rate)",
        "",
        (calling(test_dropout.test_inner_products_keep_their_mean, False),),
    ),
    Mutant(
        "dropout drops the bias",
        retriever.Retriever.dropped,
        "return self._finished(towers * kept / (1 - rate))",
        "return self._finished(towers * kept / (1 - rate)) * (uniform[..., :1] >= rate)",
        (calling(test_dropout.test_inner_products_keep_their_mean, True),),
    ),
    Mutant(
        "a bias that is counted twice",
        retriever.Retriever._finished,
        "torch.ones_like(vectors[..., :1])",
        "torch.full_like(vectors[..., :1], 2.0)",
        (calling(test_dropout.test_inner_products_keep_their_mean, True),),
    ),
    Mutant(
        "simple negatives from the positive's own cluster",
        clusters.cluster_chances,
        "& ~torch.eye(len(sizes), dtype=torch.bool)",
        "| torch.eye(len(sizes), dtype=torch.bool)",
        (calling(cluster_tests.test_simple_ones_come_from_other_clusters, True),),
    ),
    Mutant(
        "a similarity where equation 9 needs a distance",
        clusters.cluster_chances,
        "(1 - unit @ unit.T)",
        "(1 + unit @ unit.T)",
        (calling(cluster_tests.test_clusters_follow_equation_9, 1.0, "cosine"),),
    ),
    Mutant(
        "clusters drawn with replacement",
        clusters.OtherClusters.draw,
        "first.indices",
        "first.indices[:, :1].expand(-1, self.m_c)",
        (calling(cluster_tests.test_simple_ones_come_from_other_clusters, True),),
    ),
    Mutant(
        "hard negatives from the positive's own cell",
        clusters.SameCluster.draw,
        "torch.where(at >= hole, width, 0)",
        "torch.where(at >= hole, 0 * width, 0)",
        (cluster_tests.test_hard_ones_come_from_the_same_cluster_and_another_cell,),
    ),
    Mutant(
        "an item of a cluster drawn twice",
        inclusion.distinct,
        "torch.where(again & enough, last, pick)",
        "pick",
        (cluster_tests.test_every_set_is_as_likely,),
    ),
    Mutant(
        "shared negatives of a query's own cell count",
        clusters.ByCluster.excluded,
        "ExcludeCells(own, code=self.cell, also=also, drawn=drawn)",
        "Exclude(step.item_ids, also=also)",
        (calling(cluster_tests.test_masks_pair_by_pair, "other", "cell"),),
    ),
    Mutant(
        "a second draw that may repeat the first",
        inclusion.inclusion,
        "odds.sum(1, keepdim=True) - odds",
        "odds.sum(1, keepdim=True)",
        (calling(count_tests.test_inclusion_is_the_sum_over_orders, 2),),
    ),
    Mutant(
        "a race that counts one too many",
        inclusion._raced,
        "b.cumsum(0).flip(0)",
        "b.sum(0)",
        (calling(count_tests.test_inclusion_is_the_sum_over_orders, 3),),
    ),
    Mutant(
        "expected counts of one row for the whole batch",
        clusters.ByCluster.log_counts,
        " + math.log(len(drawn.ids))",
        "",
        (calling(count_tests.test_shared_simple_ones_stand_for_what_is_not_masked, "cluster"),),
    ),
    Mutant(
        "expected counts of clusters for those of their items",
        clusters.OtherClusters.tables,
        " / codes.sizes.clamp(min=1)",
        "",
        (calling(count_tests.test_shared_simple_ones_stand_for_what_is_not_masked, "cell"),),
    ),
    Mutant(
        "positives of all clusters alike",
        clusters.OtherClusters.tables,
        "(share @ count)",
        "count.mean(0)",
        (calling(count_tests.test_expected_counts_by_hand, 2),),
    ),
    Mutant(
        "hard negatives that stand for their own number",
        clusters.SameCluster.tables,
        "math.log(self.m_h) - left.float().log()",
        "0 * left.float()",
        (calling(count_tests.test_all_items_but_the_cell, 2, True),),
    ),
    Mutant(
        "the rest of the positive's cluster counted twice",
        clusters.ByCluster.excluded,
        'self.exclude == "cluster"',
        "False",
        (calling(count_tests.test_all_items_but_the_cell, 2, True),),
    ),
    Mutant(
        "only the first of two masks",
        types.Exclude.hits,
        "if self.also is None:",
        "if True:",
        (calling(cluster_tests.test_masks_pair_by_pair, "other", "known"),),
    ),
    Mutant(
        "mixtures of a query's own cluster count",
        edis.Interpolated.forward,
        "Exclude(own) if self.source.shared",
        "None if self.source.shared",
        (edis_tests.test_the_whole_bag_by_hand,),
    ),
    Mutant(
        "shares without their exponent",
        edis.Interpolated.shares,
        "** self.eta",
        "** 1.0",
        (calling(edis_tests.test_shares_by_hand, "minmax_block"),),
    ),
    Mutant(
        "mixtures of all items instead of a set",
        edis.Interpolated.shares,
        "d = d * member",
        "d = d * (member | True)",
        (calling(edis_tests.test_the_number_of_mixtures, 4),),
    ),
    Mutant(
        "lam on the negative instead of the positive",
        edis.TowardsPositive.forward,
        "torch.lerp(block.emb, positive, lam)",
        "torch.lerp(block.emb, positive, 1 - lam)",
        (calling(edis_tests.test_lam, 0.0), calling(edis_tests.test_lam, -0.3)),
    ),
    Mutant(
        "a detached positive that is still pulled",
        edis.TowardsPositive.forward,
        "step.v.detach() if self.detach_positive else step.v",
        "step.v",
        (calling(edis_tests.test_the_pull_on_the_positive, True),),
    ),
    Mutant(
        "adaptive lam without its bound",
        edis.TowardsPositive.adapt,
        "gap.clamp(min=abs(self.margin) / self.high)",
        "gap",
        (edis_tests.test_adaptive_lam_holds_the_advantage,),
    ),
    Mutant(
        "one lam for all clusters",
        edis.TowardsPositive.adapt,
        'self.source.primary(step.item_ids) if self.rule == "learned" else torch.zeros_like(step.item_ids)',
        "torch.zeros_like(step.item_ids)",
        (edis_tests.test_learned_lam_is_each_clusters_least_squares,),
    ),
    Mutant(
        "mixtures as vectors without their mask",
        types.Candidates.plain,
        "if self.mix.exclude is not None:",
        "if False:",
        (calling(edis_tests.test_logits_mixed_or_vectors_mixed, "minmax_block", True, losses.sampled_softmax),),
    ),
    Mutant(
        "mixtures give their members no gradient",
        mixed_kernel._Blocks.block,
        "grouped.baddbmm_(weights.transpose(1, 2), mixed)",
        "pass",
        (calling(test_kernels_mixed.test_budget, "fast", test_kernels_mixed.SHAPES[0], "column", "pairs"),),
    ),
    Mutant(
        "the kernel forgets which mixtures are masked",
        mixed_kernel._Blocks.block,
        "self.mixed_places.fill(b, mixed)",
        "pass",
        (calling(test_kernels_mixed.test_budget, "fast", test_kernels_mixed.SHAPES[0], "column", "mask"),),
    ),
    Mutant(
        "a mixture without the weights of its members",
        reference.mixed_logits,
        "scores + log_w.clamp(min=NEVER)",
        "scores + 0 * log_w.clamp(min=NEVER)",
        (calling(test_kernels_mixed.test_budget, "reference", test_kernels_mixed.SHAPES[0], "column", "pairs"),),
    ),
    Mutant(
        "halves that need not be equal",
        balanced._order,
        "half = -(-n // 2)",
        "half = max(1, n // 3)",
        (calling(balanced_tests.test_the_clusters_are_those_of_a_loop, 45, 8),),
    ),
    Mutant(
        "a centre that never moves",
        balanced._settled_by_moves,
        "centres = total / length.clamp(min=1e-12).unsqueeze(2)",
        "pass",
        (calling(balanced_tests.test_the_clusters_are_those_of_a_loop, 45, 8),),
    ),
    Mutant(
        "clusters in the order of their numbers",
        batches.ClusteredBatches._order,
        "rank[order.long()] = torch.arange(self.n_rows, dtype=order.dtype)",
        "rank.copy_(torch.arange(self.n_rows, dtype=order.dtype))",
        (clustered_tests.test_an_epoch_is_clusters_in_random_order,),
    ),
    Mutant(
        "a memory of where queries stand in the batch",
        batches.ClusteredBatches.observe,
        "self.memory[step.batch.query_ids]",
        "self.memory[: len(step.batch)]",
        (clustered_tests.test_the_memory_is_what_each_query_was_in_its_last_step,),
    ),
    Mutant(
        "clusters that never grow",
        batches.ClusteredBatches.size_at,
        "2 ** sum(epoch >= when for when in self.grow)",
        "1",
        (clustered_tests.test_clusters_are_made_when_the_schedule_says,),
    ),
    Mutant(
        "a row draws the first of its pairs",
        batches.QueryRows.pairs,
        "(u * self.count[rows]).long()",
        "0",
        (clustered_tests.test_a_row_is_a_query_and_draws_one_of_its_pairs,),
    ),
    Mutant(
        "weights of pairs over all queries together",
        batches.QueryRows.__init__,
        "total = torch.zeros(len(self.queries), dtype=mass.dtype, device=mass.device).index_add_(0, which, mass)",
        "total = mass.sum().expand(len(self.queries))",
        (clustered_tests.test_pairs_are_drawn_in_proportion_to_their_weights,),
    ),
    Mutant(
        "the softmax of the hinge counts those that do not violate",
        mined.OnlineHard._hinge,
        "/ tau.reshape(-1, 1), violates)",
        "/ tau.reshape(-1, 1), torch.isfinite(hardest))",
        (calling(test_losses_mined.test_online_hard_is_its_formula, "sum", None, False, 4),),
    ),
    Mutant(
        "a dynamic margin with a gradient",
        mined.OnlineHard._hinge,
        "(positive - hardest).detach().abs()",
        "(positive - hardest).abs()",
        (calling(test_losses_mined.test_online_hard_is_its_formula, "sum", 0.1, False, 4),),
    ),
    Mutant(
        "the easiest negatives",
        mined.OnlineHard._hinge,
        "dim=1).values",
        "dim=1, largest=False).values",
        (calling(test_losses_mined.test_online_hard_is_its_formula, "sum", None, False, 4),),
    ),
    Mutant(
        "the easiest positives",
        mined.HardPairs.forward,
        "largest=False",
        "largest=True",
        (calling(test_losses_mined.test_hard_pairs_is_its_formula, 1, 1, 0.5),),
    ),
    Mutant(
        "only the drawn positive is a positive",
        mined.HardPairs.forward,
        "step.positives.of(step.query_ids).hits(block.ids)",
        "(torch.arange(len(scores)), torch.searchsorted(block.ids, step.item_ids))",
        (calling(test_losses_mined.test_hard_pairs_is_its_formula, 3, 5, 0.2),),
    ),
    Mutant(
        "lists of nearest items keep known positives",
        ance.NearestItems._made,
        "corpus.items.float(), k, corpus.positives, own)",
        "corpus.items.float(), k)",
        (calling(ance_tests.test_lists_are_the_best_unknown_items, 5, 0),),
    ),
    Mutant(
        "the last ranks are dropped and not the first",
        ance.NearestItems._made,
        "[:, self.skip :]",
        "[:, : k - self.skip]",
        (calling(ance_tests.test_lists_are_the_best_unknown_items, 3, 2),),
    ),
    Mutant(
        "delayed lists hold as soon as they are made",
        ance.NearestItems.refresh,
        "if self.delay and int(self.due) == corpus.epoch:",
        "if self.delay:",
        (calling(delayed_lists, 2),),
    ),
    Mutant(
        "a checkpoint without the lists that are being made",
        ance.NearestItems.wait,
        "self.coming.copy_(work.result())",
        "work.result()",
        (ance_tests.test_a_checkpoint_has_the_lists_that_are_being_made,),
    ),
    Mutant(
        "a centroid is a sum",
        augmented.Centroids.refresh,
        "total / (number + self.shrink).clamp(min=1)",
        "total",
        (centroids_by_hand,),
    ),
    Mutant(
        "a tree that parts at the worst place",
        tree._best_splits,
        "gain = (t_l**2",
        "gain = -(t_l**2",
        (test_tree.test_one_split_is_the_best_of_all,),
    ),
    Mutant(
        "every row of a shard is its first",
        sharded.ShardedTable.forward,
        "flat[place] - low",
        "(flat[place] - low) * 0",
        (calling(test_sharded.test_a_start_and_any_ids_are_those_of_one_table, 10, 3),),
    ),
    Mutant(
        "rare items have vectors of their own",
        augmented.Augmented.assign,
        "descending=True",
        "descending=False",
        (test_augmented.test_frequent_items_have_vectors_of_their_own_and_the_others_share_equally,),
    ),
]
