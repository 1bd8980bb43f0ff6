"""Text encoders on judged texts: a run or a SentenceTransformer on folders of BEIR and NanoBEIR, and as MTEB asks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sparring.core.errors import UserError
from sparring.core.extras import optional
from sparring.data.formats.beir import is_beir, read_beir
from sparring.data.interactions import TEST, Interactions
from sparring.data.texts.texts import text_of
from sparring.evaluation.metrics import METRICS
from sparring.evaluation.ranking import Evaluation, evaluate_lists, top_k
from sparring.training.sentence_transformers import encoded


def evaluate_texts(
    model: Any,
    data: Interactions | str | os.PathLike[str],
    k: Sequence[int] = (10, 100),
    metrics: Sequence[str] = METRICS,
    dialect: str = "standard",
) -> Evaluation:
    """Rank all texts of the items for every judged query by cosine, and measure the lists, with grades where given.

    `model` is a SentenceTransformer or a run with text towers (`sparring.load`); its own prompts are used. `data` is a
    folder in BEIR's or NanoBEIR's layout, or data with texts: its test part, or all pairs if it has no parts. Nothing
    is masked, as in BEIR.

        evaluate_texts(load("runs/bag"), "nano/NanoMSMARCO").metrics["ndcg@10"]
    """
    data = data if isinstance(data, Interactions) else read_beir(data)
    test = data if data.split is None else data.subset(data.split == TEST)
    if not len(test):
        raise UserError("the data has no test part: there is nothing to evaluate")
    asked = np.unique(test.queries)
    queries = encoded(model, text_of(data, "query").gather(asked).to_list(), "query")
    items = encoded(model, text_of(data, "item").to_list(), "item")
    most = min(max(k), data.n_items)
    lists = top_k(queries, items, most)[1].cpu().numpy()
    if most < max(k):
        lists = np.pad(lists, ((0, 0), (0, max(k) - most)), constant_values=-1)
    return evaluate_lists(lists, test, max(data.n_items, max(k)), k, metrics, dialect)


def judged_folders(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """The folders in BEIR's or NanoBEIR's layout by name: the folder itself, or those in it."""
    top = Path(folder)
    if top.is_dir() and is_beir(top):
        return {top.name: top}
    found = {place.name: place for place in sorted(top.iterdir()) if is_beir(place)} if top.is_dir() else {}
    if not found:
        raise UserError(f"{top} holds no data set in BEIR's layout: corpus, queries and qrels, as jsonl or Parquet")
    return found


def retrieval_evaluator(folder: str | os.PathLike[str], k: int = 10) -> Any:
    """An evaluator of SentenceTransformerTrainer: ndcg, recall and mrr at k on judged folders, and their means.

    `folder` is a data set in BEIR's or NanoBEIR's layout, or a folder of several, which are read once. The mean of ndcg
    chooses the best checkpoint.

        SentenceTransformerTrainer(..., evaluator=retrieval_evaluator("nano"))
    """
    base = optional("sentence_transformers.base.evaluation", "sentence-transformers", "an evaluator of its trainer")
    sets = {name: read_beir(place) for name, place in judged_folders(folder).items()}
    names = ("ndcg", "recall", "mrr")

    class RetrievalEvaluator(base.BaseEvaluator):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.primary_metric = f"mean_ndcg@{k}"

        def __call__(
            self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
        ) -> dict[str, float]:
            found = {name: evaluate_texts(model, data, (k,), names).metrics for name, data in sets.items()}
            each = {f"{name}_{key}": value for name, values in found.items() for key, value in values.items()}
            keys = next(iter(found.values()))
            return each | {f"mean_{key}": float(np.mean([values[key] for values in found.values()])) for key in keys}

    return RetrievalEvaluator()


class MTEBEncoder:
    """A run with text towers in the form that MTEB calls: `encode` with a prompt type, `similarity`.

    Queries go through the query tower, all other texts through the item tower, each with its own prompt.

        mteb.evaluate(MTEBEncoder(sparring.load("runs/bag")), tasks=mteb.get_tasks(["NFCorpus"]))
    """

    mteb_model_meta = None

    def __init__(self, trained: Any) -> None:
        self.trained = trained

    def encode(self, inputs: Iterable[Any], *args: Any, prompt_type: Any = None, **others: Any) -> np.ndarray:
        """(n, D) float32 of length 1: of texts, or of batches that hold them under `text`."""
        texts: list[str] = []
        for each in [inputs] if isinstance(inputs, str) else inputs:
            if isinstance(each, str):
                texts.append(each)
            elif isinstance(each, Mapping) and "text" in each:
                texts += [each["text"]] if isinstance(each["text"], str) else list(each["text"])
            else:
                raise UserError(f"MTEB passed a {type(each).__name__} without texts: only text tasks are supported")
        kind = getattr(prompt_type, "value", prompt_type)
        return encoded(self.trained, texts, "query" if kind == "query" else "item").cpu().numpy()

    def similarity(self, first: Any, second: Any) -> Tensor:
        """Cosines (n, m) of two sets of vectors."""
        return _unit(first) @ _unit(second).T

    def similarity_pairwise(self, first: Any, second: Any) -> Tensor:
        """Cosines (n,) of vectors in pairs."""
        return (_unit(first) * _unit(second)).sum(-1)


def _unit(vectors: Any) -> Tensor:
    return F.normalize(torch.atleast_2d(torch.as_tensor(vectors)).float(), dim=-1)
