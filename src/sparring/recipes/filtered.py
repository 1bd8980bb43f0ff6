"""Hard negatives without the false ones, by a guide: TopK-PercPos, TopK-MarginPos, GISTEmbed, RocketQA.

A training row is a query with one of its positives, redrawn in each epoch, as in extreme.py. Mined negatives are those
of ANCE; `guide` names the scores that judge them (guides.py).
"""

from __future__ import annotations

from typing import Annotated

from sparring.data.interactions import Interactions
from sparring.negatives import InBatch, NearestItems, Union, Unless
from sparring.recipes.arguments import Range
from sparring.recipes.extreme import SOFTMAX
from sparring.recipes.guides import OWN, open_guide
from sparring.recipes.in_batch import with_pairs
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup

GuideName = Annotated[
    str, "own (the model's scores), an encoder, a cross-encoder's folder, Q.npy+I.npy, a table of scores or a graph"
]
Draws = Annotated[int, "draws from the list of each query"]
Listed = Annotated[int, "nearest items listed for each query"]
Rankings = Annotated[int, "epochs between two rankings"]
First = Annotated[int, "epoch of the first ranking; 0 is the first epoch"]

PROBABILITY = 0.1  # RocketQA takes a passage for a negative below this probability of the cross-encoder


def topk_percpos(
    data: Interactions,
    setup: Setup = SOFTMAX,
    *,
    guide: GuideName = OWN,
    relative: Annotated[float, Range(0.8, 1.0), "share of the positive's score that a negative must stay below"] = 0.95,
    n: Draws = 4,
    k: Listed = 200,
    every: Rankings = 5,
    start: First = 1,
) -> Run:
    """In-batch negatives and mined ones that score below 95 % of the positive (TopK-PercPos of NV-Retriever).

    Moreira et al., NV-Retriever: Improving Text Embedding Models with Effective Hard-Negative Mining, arXiv 2407.15831.
    """
    mined = Unless(_nearest(data, n, k, every, start), open_guide(guide, data), relative=relative)
    return _with_batch(data, setup, mined)


def topk_marginpos(
    data: Interactions,
    setup: Setup = SOFTMAX,
    *,
    guide: GuideName = OWN,
    margin: Annotated[float, Range(0.0, 0.3), "distance below the positive's score that a negative must keep"] = 0.05,
    n: Draws = 4,
    k: Listed = 200,
    every: Rankings = 5,
    start: First = 1,
) -> Run:
    """In-batch negatives and mined ones that score at least a margin below the positive (TopK-MarginPos).

    Moreira et al., NV-Retriever: Improving Text Embedding Models with Effective Hard-Negative Mining, arXiv 2407.15831.
    """
    mined = Unless(_nearest(data, n, k, every, start), open_guide(guide, data), margin=margin)
    return _with_batch(data, setup, mined)


def gist(
    data: Interactions,
    setup: Setup = SOFTMAX,
    *,
    guide: GuideName = OWN,
    margin: Annotated[float, Range(-0.1, 0.2), "distance below the positive's score that a negative must keep"] = 0.0,
) -> Run:
    """In-batch negatives without those that a guide ranks above the positive (GISTEmbed).

    The paper's guide is a larger encoder: name one. The model itself, the default, drops its own mistakes too.
    Solatorio, GISTEmbed: Guided In-sample Selection of Training Negatives for Text Embedding Fine-tuning, arXiv
    2402.16829.
    """
    return compose(data, setup, Term(1.0, Unless(InBatch(exclude="known"), open_guide(guide, data), margin=margin)))


def rocketqa(
    data: Interactions,
    setup: Setup = SOFTMAX,
    *,
    guide: GuideName = OWN,
    most: Annotated[
        float | None, "guide's score from which an item is no negative; none: 0.1, or the positive's for guide=own"
    ] = None,
    n: Draws = 4,
    k: Listed = 200,
    every: Rankings = 5,
    start: First = 1,
) -> Run:
    """In-batch negatives and mined ones that a cross-encoder is sure about (denoised hard negatives of RocketQA).

    Name a cross-encoder, or better a table of its scores, as written by `sparring mine`.
    Qu et al., RocketQA: An Optimized Training Approach to Dense Passage Retrieval for Open-Domain Question Answering,
    NAACL 2021.
    """
    judge, nearest = open_guide(guide, data), _nearest(data, n, k, every, start)
    if guide == OWN and most is None:
        mined = Unless(nearest, judge, margin=0.0)
    else:
        mined = Unless(nearest, judge, most=PROBABILITY if most is None else most)
    return _with_batch(data, setup, mined)


def _with_batch(data: Interactions, setup: Setup, mined: Unless) -> Run:
    """Mined negatives beside those of the batch."""
    return compose(data, setup, Term(1.0, Union(InBatch(exclude="known"), mined)))


def _nearest(data: Interactions, n: int, k: int, every: int, start: int) -> NearestItems:
    """Draws from the lists of ANCE, each against the query of the list alone."""
    k, among = min(k, data.n_items), with_pairs(data)
    return NearestItems(data.n_queries, n, k, every=every, start=start, per_query=True, among=among)
