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

import negatives.test_algebra as algebra_tests
import negatives.test_batch as batch_tests
import negatives.test_cache as cache_tests
import negatives.test_corrections as correction_tests
import negatives.test_distributions as distribution_tests
import negatives.test_published as published_tests
import negatives.test_sampled as sampled_tests
import test_kernels
import test_losses
import test_types
from sparring import losses, types
from sparring.kernels import chunked, reference
from sparring.negatives import algebra, batch, corpus, distributions
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


PARTITION, EXCLUDED, DISTRIBUTION = "test_partition_function", "test_excluded_items_weigh_nothing", "test_distribution"
GRADIENT, DESCRIBES = "test_loss_and_gradient", "test_bag_describes_itself"
uniform, in_batch, mixed = sampled_tests.TestUniform, batch_tests.TestInBatch, batch_tests.TestMixed

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
        "positive = log_size - log_count(step.item_ids)",
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
        types.Exclude.hits,
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
        types.Exclude.hits,
        "torch.searchsorted(ordered, self.ids, right=True) - low",
        "(torch.searchsorted(ordered, self.ids, right=True) - low).clamp(max=1)",
        (test_types.test_own_positive_among_shared_candidates, of(in_batch, GRADIENT)),
    ),
    Mutant(
        "known positives without the last of each query",
        types.Positives.of,
        "self.start[query_ids + 1] - self.start[query_ids]",
        "(self.start[query_ids + 1] - self.start[query_ids] - 1).clamp(min=0)",
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
        batch.Cache.observe,
        "block.usage.double()",
        "(block.usage > 0).double()",
        (cache_tests.test_occurrences_add_up_over_all_draws_of_all_terms,),
    ),
    Mutant(
        "occurrences of the first term only",
        batch.Cache.observe,
        "for bag in outcome.bags:",
        "for bag in outcome.bags[:1]:",
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
        "self.occurrences += ",
        "self.occurrences.copy_(self.occurrences.float()); self.occurrences += 0 * ",
        (cache_tests.test_large_counts_still_register_small_additions,),
    ),
    Mutant(
        "the positive counted twice",
        losses.sampled_softmax,
        "return ",
        "return math.log(2) + ",
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
        "log_w=counts.log()",
        "log_w=(counts > 0).log()",
        (of(algebra_tests.TestMultinomial, DISTRIBUTION), published(published_tests.test_bir, "multinomial")),
    ),
    Mutant(
        "systematic draws off by one",
        algebra.systematic_counts,
        "torch.floor(cdf * n + u)",
        "torch.ceil(cdf * n + u)",
        (calling(algebra_tests.test_systematic_counts, 7),),
    ),
    Mutant(
        "systematic draws without a random start",
        algebra.systematic_counts,
        "torch.floor(cdf * n + u)",
        "torch.floor(cdf * n)",
        (calling(algebra_tests.test_systematic_counts, 7),),
    ),
    Mutant(
        "the hardest are the easiest",
        algebra.Hardest.forward,
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
        "step.item_ids[-len(self.ids) :]",
        "step.item_ids[: len(self.ids)]",
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
        losses._logsumexp,
        "step.scaled",
        "step.q",
        (of(uniform, GRADIENT),),
    ),
    Mutant(
        "a pairwise mean that counts masked candidates",
        losses._pairwise,
        "mass = mass + weights.sum(1)",
        "mass = mass + weights.shape[1]",
        (calling(test_losses.test_pairwise, losses.bpr, lambda x: test_losses.torch.log1p(x.exp())),),
    ),
]
