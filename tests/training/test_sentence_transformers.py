"""The loss and the miner with the real library, a tiny random BERT and a real SentenceTransformerTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.core.errors import UserError
from sparring.negatives import Cache, InBatch, Memory, QuantizedSoftmax, Resample, Sampled, Uniform, Union
from sparring.recipes import item_frequency
from sparring.training.sentence_transformers import NegativesLoss, hard_negatives, in_batch, pairs_of
from sparring.training.text_batches import text_keys
from support.texts import WORDS, sentence_folder

library = pytest.importorskip("sentence_transformers")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
datasets = pytest.importorskip("datasets")

TAU = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_folder(tmp_path_factory.mktemp("sentence"))


@pytest.fixture
def model(folder: Path) -> Any:
    return library.SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def dataset() -> Any:
    """40 rows of 12 anchors and 9 positives, with popular positives, several per anchor, and repeated pairs."""
    draw = np.random.default_rng(1)
    anchors = [f"{WORDS[i]} {WORDS[(i * 5 + 3) % 16]}" for i in range(12)]
    positives = [f"{WORDS[15 - i]} {WORDS[(i * 3 + 1) % 16]} {WORDS[i]}" for i in range(9)]
    rows = [(anchors[draw.integers(12)], positives[min(int(draw.exponential(3)), 8)]) for _ in range(40)]
    return datasets.Dataset.from_dict({"anchor": [a for a, _ in rows], "positive": [p for _, p in rows]})


def batch(model: Any, *columns: list[str]) -> list[dict[str, Any]]:
    return [model.preprocess(column) for column in columns]


def vectors(model: Any, texts: list[str]) -> torch.Tensor:
    return torch.from_numpy(model.encode(texts, normalize_embeddings=True)).double()


def test_the_default_is_corrected_in_batch_softmax(model: Any, dataset: Any) -> None:
    """The loss is -log of the positive's share among itself and the other texts of the batch, weighted by 1 / ((B - 1)
    q), q the share of all rows; texts paired with the anchor anywhere in the dataset are excluded."""
    rows = dataset.select(range(12))
    anchors, positives = list(rows["anchor"]), list(rows["positive"])
    found = NegativesLoss(model, dataset, tau=TAU)(batch(model, anchors, positives))
    every = list(dataset["positive"])
    known = set(zip(dataset["anchor"], every, strict=True))
    scores = vectors(model, anchors) @ vectors(model, positives).T / TAU
    want = []
    for i, anchor in enumerate(anchors):
        terms = [np.exp(scores[i, i].item())]
        for j, other in enumerate(positives):
            if (anchor, other) not in known:
                terms.append(np.exp(scores[i, j].item()) / ((len(positives) - 1) * every.count(other) / len(every)))
        want.append(np.log(sum(terms)) - scores[i, i].item())
    assert found.item() == pytest.approx(np.mean(want), rel=1e-4)


def test_uncorrected_it_is_the_librarys_own_loss(model: Any, dataset: Any) -> None:
    """Without masks and weights, on distinct texts, it is MultipleNegativesRankingLoss, hard negatives included."""
    columns = ["red", "blue hat", "old lamp"], ["shoe", "hat", "lamp"], ["cold lamp", "chair", "wool coat"]
    rows = {"anchor": columns[0], "positive": columns[1]}
    ours = NegativesLoss(model, rows, lambda data: InBatch(exclude="positive"), tau=TAU)(batch(model, *columns))
    theirs = losses.MultipleNegativesRankingLoss(model, scale=1 / TAU)(batch(model, *columns), None)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)


def trained(model: Any, dataset: Any, loss: torch.nn.Module, folder: Path, **arguments: Any) -> float:
    """The loss that a real SentenceTransformerTrainer reports."""
    args = library.SentenceTransformerTrainingArguments(
        str(folder), report_to="none", save_strategy="no", use_cpu=True, **arguments
    )
    trainer = library.SentenceTransformerTrainer(model=model, args=args, train_dataset=dataset, loss=loss)
    return float(trainer.train().training_loss)


NEGATIVES = {
    "in batch": in_batch,
    "uniform": lambda data: Union(in_batch(data), Sampled(Uniform(data.n_items), 5)),
    "bir": lambda data: Resample(InBatch(item_frequency(data))),
    "cache": lambda data: Resample(Cache(6, item_frequency(data), data.n_items)),
    "memory": lambda data: Union(InBatch(item_frequency(data)), Memory(20, 16, item_frequency(data))),
}


@pytest.mark.parametrize("name", NEGATIVES)
def test_it_trains_in_the_real_trainer(model: Any, dataset: Any, tmp_path: Path, name: str) -> None:
    """In SentenceTransformerTrainer weights move, the loss is finite, and caches observe the batches."""
    before = vectors(model, WORDS)
    loss = NegativesLoss(model, dataset, NEGATIVES[name])
    state = {key: value.clone() for key, value in loss.negatives.state_dict().items()}
    assert np.isfinite(
        trained(model, dataset, loss, tmp_path, num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-3)
    )
    assert (vectors(model, WORDS) - before).norm() > 0.01
    changed = any(not torch.equal(value, state[key]) for key, value in loss.negatives.state_dict().items())
    assert changed is (name in ("cache", "memory"))


def test_it_learns(model: Any, dataset: Any, tmp_path: Path) -> None:
    """After training, an anchor's own texts outrank the others more often than before."""

    def found() -> float:
        data = pairs_of(dataset)
        scores = vectors(model, data.query_ids.ids.to_list()) @ vectors(model, data.item_ids.ids.to_list()).T
        own = torch.zeros_like(scores)
        own[torch.from_numpy(data.queries).long(), torch.from_numpy(data.items).long()] = 1
        return float(own.gather(1, scores.argmax(1, keepdim=True)).mean())

    before = found()
    loss = NegativesLoss(model, dataset)
    trained(model, dataset, loss, tmp_path, num_train_epochs=25, per_device_train_batch_size=20, learning_rate=3e-3)
    assert found() > max(before, 0.8)


def test_texts_are_recognised_by_their_tokens(model: Any, dataset: Any) -> None:
    """The hash ignores padding and depends on tokens and order; a text outside the dataset raises an error."""
    tokens, mask = (
        torch.tensor([[2, 5, 6, 3, 0], [0, 2, 5, 6, 3], [2, 6, 5, 3, 0], [2, 5, 3, 0, 0]]),
        torch.tensor([1, 1, 1, 1, 0]),
    )
    masks = torch.stack([mask, mask.flip(0), mask, torch.tensor([1, 1, 1, 0, 0])])
    keys = text_keys({"input_ids": tokens, "attention_mask": masks}).tolist()
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    loss = NegativesLoss(model, dataset)
    with pytest.raises(UserError, match=r"an anchor .* not in the dataset"):
        loss(batch(model, ["old old old"], [dataset["positive"][0]]))
    prompted = NegativesLoss(model, dataset, prompts=("new ", None))
    features = [model.preprocess([dataset["anchor"][0]], prompt="new "), model.preprocess([dataset["positive"][0]])]
    assert torch.isfinite(prompted(features))


def test_bad_data_is_refused(model: Any, dataset: Any) -> None:
    """Negatives that nobody refreshes, a dataset of one column and a row without a text raise errors."""
    loss = NegativesLoss(model, dataset, lambda data: QuantizedSoftmax(data.n_items, 16, 4, 2))
    with pytest.raises(UserError, match="refreshing"):
        loss(batch(model, dataset["anchor"][:4], dataset["positive"][:4]))
    with pytest.raises(UserError, match="anchors and positives"):
        NegativesLoss(model, {"anchor": ["red"]})
    with pytest.raises(UserError, match="text in anchor"):
        pairs_of({"anchor": ["red", None], "positive": ["hat", "coat"]})
    assert pairs_of({"label": [1, 2], "a": ["1", "1"], "b": ["x", "x"]}).counts().tolist() == [2]
    assert isinstance(in_batch(pairs_of(dataset)), InBatch)


@pytest.mark.parametrize(("skip", "margin"), [(0, None), (2, None), (0, 0.02)])
def test_mined_negatives_are_the_nearest_that_are_not_positive(
    model: Any, dataset: Any, skip: int, margin: float | None
) -> None:
    """Mining equals a loop over all texts, with known positives excluded, ranks skipped and the margin kept."""
    mined = hard_negatives(model, dataset, n=2, skip=skip, margin=margin)
    texts = sorted(set(dataset["positive"]))
    scores = {
        a: dict(zip(texts, (vectors(model, texts) @ vectors(model, [a])[0]).tolist(), strict=True))
        for a in set(dataset["anchor"])
    }
    known = set(zip(dataset["anchor"], dataset["positive"], strict=True))
    want = []
    for anchor, positive in zip(dataset["anchor"], dataset["positive"], strict=True):
        others = sorted((t for t in texts if (anchor, t) not in known), key=lambda t: -scores[anchor][t])[skip:]
        if margin is not None:
            others = [t for t in others if scores[anchor][t] < scores[anchor][positive] - margin]
        if len(others) >= 2:
            want.append((anchor, positive, *others[:2]))
    assert len(want) > 0
    assert mined.rows() == want


def test_drawn_negatives_follow_the_scores(model: Any, dataset: Any) -> None:
    """Over many seeds, the first negative of a row is drawn in proportion to exp(cosine / tau)."""
    anchor = dataset["anchor"][0]
    texts = sorted(
        set(dataset["positive"])
        - {p for a, p in zip(dataset["anchor"], dataset["positive"], strict=True) if a == anchor}
    )
    weight = (vectors(model, texts) @ vectors(model, [anchor])[0] / 0.2).exp()
    drawn = [
        hard_negatives(model, dataset, n=1, how="draw", tau=0.2, seed=seed)["negative_1"][0] for seed in range(200)
    ]
    share = np.array([drawn.count(text) / 200 for text in texts])
    want = (weight / weight.sum()).numpy()
    assert ((share - want) ** 2 / want).sum() * 200 < 30  # chi-square with at most 8 degrees of freedom: p < 0.001


def test_the_library_reads_what_was_mined(model: Any, dataset: Any, tmp_path: Path) -> None:
    """Mined JSON lines are read by datasets and train with the library's loss and with ours."""
    hard_negatives(model, dataset, n=2).write_ndjson(tmp_path / "mined.jsonl")
    again = datasets.load_dataset(
        "json", data_files=str(tmp_path / "mined.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert again.column_names == ["anchor", "positive", "negative_1", "negative_2"]
    for loss in (losses.MultipleNegativesRankingLoss(model), NegativesLoss(model, again)):
        assert np.isfinite(trained(model, again, loss, tmp_path, max_steps=2, per_device_train_batch_size=8))


def test_a_run_of_ours_mines_and_is_read_by_the_library(dataset: Any, folder: Path, tmp_path: Path) -> None:
    """A trained text tower mines by its own vectors, and its encoder folder opens as an equal SentenceTransformer."""
    from sparring.data.interactions import Split
    from sparring.recipes.settings import build
    from sparring.training.fitting import fit
    from sparring.training.trained import load

    data = pairs_of(dataset)
    run = build("ssl", data, {"encoder": str(folder), "epochs": 1, "batch_size": 8, "max_len": 8})
    fit(run, Split(data), tmp_path / "run", device="cpu")
    trained = load(tmp_path / "run")
    assert isinstance(hard_negatives(trained, dataset, n=2), pl.DataFrame)
    theirs = library.SentenceTransformer(str(tmp_path / "run" / "encoder"), device="cpu")
    torch.testing.assert_close(
        vectors(theirs, WORDS).float(), trained.encode_texts(WORDS, "item"), rtol=1e-4, atol=1e-5
    )
