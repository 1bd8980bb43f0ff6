"""TopK-PercPos, TopK-MarginPos, GISTEmbed and RocketQA as recipes, and guides by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.data.texts.texts import text_of
from sparring.negatives import NearestItems, RelatedItems, TableScores, Unless, VectorScores
from sparring.recipes.guides import open_guide
from sparring.recipes.settings import build
from sparring.training.loop import Trainer, TrainingProgress
from support.by_hand import INF, TINY, B, Hand, check
from support.texts import text_parts, tiny_bert

TAU = 0.25


@pytest.fixture(scope="module")
def texts() -> Split:
    return text_parts()


def guide_vectors(parts: Split, folder: Path) -> tuple[str, Tensor, Tensor]:
    """A guide's name, and its vectors of queries and items."""
    random = np.random.default_rng(0)
    queries, items = (
        random.normal(size=(n, 3)).astype(np.float32) for n in (parts.train.n_queries, parts.train.n_items)
    )
    np.save(folder / "q.npy", queries)
    np.save(folder / "i.npy", items)
    return f"{folder / 'q.npy'}+{folder / 'i.npy'}", torch.from_numpy(queries), torch.from_numpy(items)


def test_gist_is_the_softmax_over_what_the_guide_ranks_below_the_positive(parts: Split, tmp_path: Path) -> None:
    """One step equals the in-batch softmax, without known positives and pairs that the guide ranks at least as high."""
    name, queries, items = guide_vectors(parts, tmp_path)
    hand = Hand(parts.train, build("gist", parts.train, {**TINY, "tau": TAU, "warmup": 0, "guide": name}))
    scores = queries[hand.queries] @ items[hand.items].T
    dropped = scores >= (queries[hand.queries] * items[hand.items]).sum(1, keepdim=True)
    assert 0.2 < float(dropped.float().mean()) < 0.8
    left = torch.where(dropped, -INF, 0.0) + hand.unknown(hand.items)
    check(hand.contrast()[0], hand.softmax_loss(hand.logits(hand.items) + left))


@pytest.mark.parametrize(
    ("name", "settings", "share", "margin"),
    [
        ("topk_percpos", {"relative": 0.8}, 0.8, 0.0),
        ("topk_marginpos", {"margin": 0.3}, 1.0, 0.3),
        ("rocketqa", {}, 1.0, 0.0),
    ],
)
def test_mined_negatives_stay_below_the_bound(
    parts: Split, name: str, settings: dict[str, Any], share: float, margin: float
) -> None:
    """One step equals the softmax over the batch and those of the query's own listed items that score low enough."""
    run = build(name, parts.train, {**TINY, "tau": TAU, "warmup": 0, "k": 20, "n": 8, "start": 0, **settings})
    trainer = Trainer(run, parts, torch.device("cpu"), None, TrainingProgress())
    trainer.refresh()
    hand = Hand(parts.train, run)
    found, _step, outcome = hand.contrast()
    unless = next(part for part in run.terms[0].negatives.modules() if isinstance(part, Unless))
    assert isinstance(unless.source, NearestItems)
    mined = outcome.bags[0].blocks[1].ids
    assert mined.shape == (B, 8)
    score, positive = hand.logits(mined) * TAU, hand.positive.unsqueeze(1) * TAU
    bound = positive - (1 - share) * positive.abs() - margin
    dropped = (score >= bound) & (mined != hand.items.unsqueeze(1))
    assert 0 < int(dropped.sum()) < dropped.numel()
    batch = hand.logits(hand.items) + hand.unknown(hand.items)
    check(found, hand.softmax_loss(batch, (hand.logits(mined)).masked_fill(dropped, -INF)))


def test_guides_by_name(texts: Split, tmp_path: Path) -> None:
    """Tables, graphs, encoders and cross-encoders give the scores that their files or models have, pair by pair."""
    import sentence_transformers
    import transformers

    train = texts.train
    step_queries, step_items = train.pairs()
    pairs = pl.DataFrame({"query": train.queries, "item": train.items, "score": np.arange(len(train)) / len(train)})
    pairs.write_parquet(tmp_path / "scores.parquet")
    table = open_guide(str(tmp_path / "scores.parquet"), train)
    assert isinstance(table, TableScores)
    found = table.look_up(step_queries[:9], step_items[:9].unsqueeze(1)).flatten()
    torch.testing.assert_close(found, torch.arange(9) / len(train))

    pl.DataFrame({"item": [0, 5], "related": [3, 0]}).write_csv(tmp_path / "graph.csv")
    graph = open_guide(str(tmp_path / "graph.csv"), train)
    assert isinstance(graph, RelatedItems)
    rows = graph.look_up(torch.tensor([0, 3]), torch.arange(train.n_items))
    assert torch.nonzero(rows).tolist() == [[0, 0], [0, 3], [0, 5], [1, 0], [1, 3]]

    bag = open_guide("bag", train)
    assert isinstance(bag, VectorScores)
    torch.testing.assert_close(bag.items.norm(dim=1), torch.ones(train.n_items))

    bert = tiny_bert(tmp_path / "bert", 0.0)
    sentence_transformers.SentenceTransformer(str(bert), device="cpu").save(str(tmp_path / "st"))
    dense = open_guide(str(tmp_path / "st"), train)
    assert isinstance(dense, VectorScores)
    model = transformers.AutoModel.from_pretrained(bert).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    with torch.no_grad():
        one = model(**tokenizer(text_of(train, "item")[3], return_tensors="pt")).last_hidden_state[0].mean(0)
    torch.testing.assert_close(dense.items[3], F.normalize(one, dim=0), atol=1e-5, rtol=1e-4)

    with torch.random.fork_rng():
        torch.manual_seed(1)
        judge = transformers.AutoModelForSequenceClassification.from_pretrained(bert, num_labels=1).eval()
    judge.save_pretrained(tmp_path / "cross")
    tokenizer.save_pretrained(tmp_path / "cross")
    cross = open_guide(str(tmp_path / "cross"), train)
    run = build("rocketqa", train, {"guide": str(tmp_path / "cross"), "most": 0.5, "dim": 4, "epochs": 1, "start": 0})
    step = Hand(train, run).contrast()[1]
    scores = cross(step, torch.tensor([4, -1]), None)
    texts_of = [text_of(train, "query")[int(step.query_ids[0])], text_of(train, "item")[4]]
    with torch.no_grad():
        logit = judge(**tokenizer(*texts_of, return_tensors="pt")).logits[0, 0]
    torch.testing.assert_close(scores[0, 0], torch.sigmoid(logit), atol=1e-5, rtol=1e-4)
    assert bool(scores[:, 1].isnan().all())


def test_guides_that_do_not_fit_are_refused_in_one_line(texts: Split, tmp_path: Path) -> None:
    """Missing scores, training pairs without one, foreign ids, one file of vectors, other widths, unknown names."""
    train = texts.train
    np.save(tmp_path / "q.npy", np.zeros((train.n_queries, 3), np.float32))
    np.save(tmp_path / "i.npy", np.zeros((train.n_items, 4), np.float32))
    some = pl.DataFrame({"query": train.queries[:5], "item": train.items[:5], "score": np.ones(5)})
    some.write_parquet(tmp_path / "some.parquet")
    some.with_columns(score=pl.lit(None, pl.Float64)).write_parquet(tmp_path / "null.parquet")
    some.with_columns(pl.col("query") + 10_000).write_parquet(tmp_path / "foreign.parquet")
    some.drop("score").write_parquet(tmp_path / "bare.parquet")
    for name, word in {
        "some.parquet": "training pairs",
        "null.parquet": "no number",
        "foreign.parquet": "no pair",
        "bare.parquet": "no column 'score'",
        "q.npy": "Q.npy",
        f"q.npy+{tmp_path / 'i.npy'}": "width",
        "nothing": "no folder",
    }.items():
        with pytest.raises(UserError, match=word) as caught:
            open_guide(str(tmp_path / name), train)
        assert "\n" not in str(caught.value)
