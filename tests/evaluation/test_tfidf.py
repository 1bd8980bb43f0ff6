"""TF-IDF: lists equal those of the formula, written with dictionaries, and of scikit-learn where it is installed."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

from sparring.core.types import Positives
from sparring.evaluation.tfidf import COMMON, TfIdf
from support.texts import WORDS

RANDOM = np.random.default_rng(0)
VOCABULARY = [*WORDS, *(f"word{at}" for at in range(40))]


def sentences(n: int) -> list[str]:
    return [" ".join(RANDOM.choice(VOCABULARY, RANDOM.integers(0, 9))) for _ in range(n)]


ITEMS, QUERIES, COUNTED = [*sentences(60), "", "A a the Red!"], [*sentences(25), "unheard of"], sentences(30)


def by_hand(counted: list[str]) -> np.ndarray:
    """(Q, N): cosines of TF-IDF vectors."""
    texts = [Counter(re.findall(r"\w\w+", text.lower())) for text in (*ITEMS, *counted)]
    n, seen = len(texts), Counter(word for text in texts for word in text)
    idf = {w: math.log((1 + n) / (1 + each)) + 1 for w, each in seen.items() if each <= max(1, COMMON * n)}

    def vector(text: str) -> dict[str, float]:
        words = Counter(re.findall(r"\w\w+", text.lower()))
        weights = {word: (1 + math.log(f)) * idf[word] for word, f in words.items() if word in idf}
        length = math.sqrt(sum(weight**2 for weight in weights.values())) or 1.0
        return {word: weight / length for word, weight in weights.items()}

    items = [vector(text) for text in ITEMS]
    return np.array([[sum(q[w] * v.get(w, 0.0) for w in q) for v in items] for q in map(vector, QUERIES)])


@pytest.mark.parametrize("counted", [[], COUNTED], ids=["items", "items and queries"])
def test_lists_are_those_of_the_formula(counted: list[str]) -> None:
    """The best first, seen items left out, -1 for items without a common word and for a query of unknown words."""
    cosine = by_hand(counted)
    seen = Positives(torch.arange(len(QUERIES) + 1), torch.arange(len(QUERIES)).int())  # query i has seen item i
    asked = torch.tensor([3, 0, 25, 24, 11])
    found = TfIdf(ITEMS, QUERIES, counted).lists(asked, 10, seen).tolist()
    for query, row in zip(asked.tolist(), found, strict=True):
        left = [item for item in range(len(ITEMS)) if item != query and cosine[query, item] > 0]
        expected = np.array(sorted(cosine[query, left], reverse=True)[:10])
        listed = [item for item in row if item >= 0]
        assert query not in listed
        np.testing.assert_allclose(cosine[query, listed], expected, atol=1e-6)
        assert row[len(listed) :] == [-1] * (10 - len(expected))
    assert found[2] == [-1] * 10


def test_the_formula_is_that_of_scikit_learn() -> None:
    """The reference above, to which lists are compared, has scikit-learn's cosines."""
    sklearn = pytest.importorskip("sklearn.feature_extraction.text")
    counts = Counter(word for text in ITEMS for word in set(re.findall(r"\w\w+", text.lower())))
    common = [word for word, n in counts.items() if n > COMMON * len(ITEMS)]
    words = sklearn.TfidfVectorizer(sublinear_tf=True, stop_words=common).fit(ITEMS)
    theirs = (words.transform(QUERIES) @ words.transform(ITEMS).T).toarray()
    np.testing.assert_allclose(by_hand([]), theirs, atol=1e-9)
