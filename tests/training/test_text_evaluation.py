"""Encoders on judged texts: BEIR and NanoBEIR folders, an evaluator of the trainer, and the calls that MTEB makes."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data import read
from sparring.training.text_evaluation import MTEBEncoder, evaluate_texts, retrieval_evaluator
from support.texts import WORDS

CORPUS = {f"d{i}": f"{WORDS[i]} {WORDS[i + 1]}" for i in range(9)}
QUERIES = {"q0": "red hat", "q1": "coat lamp", "q2": "blue"}
QRELS = [("q0", "d0", 2), ("q0", "d4", 1), ("q1", "d5", 3), ("q2", "d1", 1), ("q2", "d2", 0)]


class Bag:
    """A run by its one method that is used here: counts of words; queries read their prompt."""

    def encode_texts(self, texts: list[str], side: str) -> Any:
        import torch

        given = [f"red {text}" if side == "query" else text for text in texts]
        return torch.tensor([[float(text.split().count(word)) + 0.01 for word in WORDS] for text in given])


def nano(folder: Path) -> Path:
    """The data in NanoBEIR's layout: Parquet, judgements without grades."""
    for name, texts in (("corpus", CORPUS), ("queries", QUERIES)):
        (folder / name).mkdir(parents=True)
        table = pl.DataFrame({"_id": list(texts), "text": list(texts.values())})
        table.write_parquet(folder / name / "train-00000-of-00001.parquet")
    (folder / "qrels").mkdir()
    rows = [(q, d) for q, d, grade in QRELS if grade]
    pl.DataFrame(rows, schema=["query-id", "corpus-id"], orient="row").write_parquet(folder / "qrels" / "a.parquet")
    return folder


def beir(folder: Path) -> Path:
    """The data in BEIR's layout, with grades."""
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", CORPUS), ("queries", QUERIES)):
        lines = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    rows = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t{grade}" for q, d, grade in QRELS)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(rows))
    return folder


def by_hand(k: int, graded: bool) -> float:
    """The mean ndcg of the bag by a loop."""
    model, values = Bag(), []
    documents = model.encode_texts(list(CORPUS.values()), "item").numpy()
    for query, text in QUERIES.items():
        vector = model.encode_texts([text], "query").numpy()[0]
        scores = documents @ vector / np.linalg.norm(documents, axis=1)
        grade = {d: (g if graded else 1) for q, d, g in QRELS if q == query and g}
        best = sorted(range(9), key=lambda i: (-round(float(scores[i]), 5), i))[:k]
        gain = sum(grade.get(f"d{i}", 0) / np.log2(r + 2) for r, i in enumerate(best))
        values.append(gain / sum(g / np.log2(r + 2) for r, g in enumerate(sorted(grade.values())[::-1][:k])))
    return float(np.mean(values))


def test_folders_of_both_layouts_are_ranked(tmp_path: Path) -> None:
    """ndcg on a graded BEIR folder and on a NanoBEIR folder equals a loop over all documents; nothing is masked."""
    assert evaluate_texts(Bag(), beir(tmp_path / "beir"), (3,)).metrics["ndcg@3"] == pytest.approx(by_hand(3, True))
    found = evaluate_texts(Bag(), nano(tmp_path / "nano"), (3, 100))
    assert found.metrics["ndcg@3"] == pytest.approx(by_hand(3, False))
    assert found.metrics["recall@100"] == 1
    assert read(tmp_path / "nano").n_items == 9


def test_an_evaluator_of_the_trainer(tmp_path: Path) -> None:
    """The evaluator reports every folder and their mean, whose ndcg is its primary metric."""
    pytest.importorskip("sentence_transformers")
    nano(tmp_path / "sets" / "a")
    beir(tmp_path / "sets" / "b")
    evaluator = retrieval_evaluator(tmp_path / "sets", k=3)
    found = evaluator(Bag())
    assert found["a_ndcg@3"] == pytest.approx(by_hand(3, False))
    assert found[evaluator.primary_metric] == pytest.approx((by_hand(3, False) + by_hand(3, True)) / 2)
    for wrong in (tmp_path / "none", tmp_path / "sets" / "a" / "qrels"):
        with pytest.raises(UserError, match="BEIR's layout"):
            retrieval_evaluator(wrong)
    (tmp_path / "sets" / "a" / "qrels" / "a.parquet").unlink()
    pl.DataFrame({"query": ["q0"]}).write_parquet(tmp_path / "sets" / "a" / "qrels" / "a.parquet")
    with pytest.raises(UserError, match="no column 'query-id'"):
        retrieval_evaluator(tmp_path / "sets")


class PromptType(StrEnum):
    """As in MTEB."""

    query = "query"
    document = "document"


def test_mteb_calls_encode(tmp_path: Path) -> None:
    """Batches of texts or plain lists are encoded by the tower of their prompt type, as MTEB passes them."""
    model = MTEBEncoder(Bag())
    texts = list(QUERIES.values())
    batches = [{"text": texts[:2], "id": ["a", "b"]}, {"text": texts[2:]}]
    given = {"task_metadata": None, "hf_split": "test", "hf_subset": "default"}
    asked = model.encode(batches, prompt_type=PromptType.query, **given)
    plain = model.encode(texts, task_name="x", prompt_type=PromptType.document)
    assert asked.shape == (3, 16)
    np.testing.assert_allclose(np.linalg.norm(asked, axis=1), 1, rtol=1e-5)
    want = Bag().encode_texts(texts, "item").numpy()
    np.testing.assert_allclose(plain, want / np.linalg.norm(want, axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(model.similarity(asked, plain).numpy(), asked @ plain.T, rtol=1e-5)
    np.testing.assert_allclose(model.similarity_pairwise(asked, plain).numpy(), (asked * plain).sum(1), rtol=1e-5)
    with pytest.raises(UserError, match="only text tasks"):
        model.encode([{"image": [1]}])
