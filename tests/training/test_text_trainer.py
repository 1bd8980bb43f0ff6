"""NegativesLoss in the real SentenceTransformerTrainer: gradient cache, ranks, ids, refreshed negatives, batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sparring.core.errors import UserError
from sparring.losses import Matryoshka, Symmetric
from sparring.negatives import InBatch, NearestItems, QuantizedSoftmax, Sampled, Uniform, Union
from sparring.training import text_batches
from sparring.training.sentence_transformers import NegativesLoss, in_batch, pairs_of
from sparring.training.text_trainer import Clustered, TextIds, refreshing
from support.ports import free_port
from support.text_ranks import all_trained, rows_of, trained
from support.texts import WORDS, sentence_folder, tiny_bert

library = pytest.importorskip("sentence_transformers")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
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
    return datasets.Dataset.from_dict(rows_of(40))


def static() -> Any:
    """A static embedding over WORDS."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: at for at, w in enumerate(WORDS)}, unk_token="red"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    return library.SentenceTransformer(modules=[modules.StaticEmbedding(words, embedding_dim=16)], device="cpu")


def batch(model: Any, *columns: list[str]) -> list[dict[str, Any]]:
    return [model.preprocess(column) for column in columns]


def gradient(model: Any, loss: torch.nn.Module, features: list[dict[str, Any]]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    value = loss(features, None)
    (value * 3).backward()  # as a gradient scaler would
    return float(value.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


NEGATIVES = {
    "in batch": in_batch,
    "drawn": lambda data: Union(in_batch(data), Sampled(Uniform(data.n_items), 5)),
    "per query": lambda data: Sampled(Uniform(data.n_items), 3, per_query=True),
}


@pytest.mark.parametrize("name", NEGATIVES)
def test_the_gradient_cache_gives_the_gradient_of_the_whole_batch(model: Any, dataset: Any, name: str) -> None:
    """Encoded 5 texts at a time, drawn texts included, the loss and the gradient of every weight are the same."""
    rows = dataset.select(range(17))
    features = batch(model, rows["anchor"], rows["positive"], rows["positive"][::-1])
    found = [
        gradient(model, NegativesLoss(model, dataset, NEGATIVES[name], Symmetric(), TAU, chunk=chunk), features)
        for chunk in (None, 5)
    ]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1].norm() > 0
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)


def test_static_vectors_are_cached_in_chunks(dataset: Any) -> None:
    """With a gradient cache a static model, whose tokens are one flat list, has the gradient of the whole batch."""
    model = static()
    positives = [*dataset["positive"][:9], "", *dataset["positive"][10:]]
    features = batch(model, dataset["anchor"][:11], positives[:11])
    loss = NegativesLoss(model, {"anchor": dataset["anchor"], "positive": positives})
    value, grad = gradient(model, loss, features)
    for chunk in (1, 4, 11, 50):
        loss.chunk = chunk
        cached, same = gradient(model, loss, features)
        assert cached == pytest.approx(value, rel=1e-6)
        torch.testing.assert_close(same, grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["flat", "padded"])
def test_tokens_made_in_slices_are_those_of_the_whole_column(
    model: Any, dataset: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column that is tokenised 7 texts at a time has the tokens of the whole column, empty texts included."""
    monkeypatch.setattr(text_batches, "_SLICE", 7)
    encoder = static() if kind == "flat" else model
    for n in (3, 7, 8, 30):
        texts = [*dataset["anchor"][: n - 1], ""]
        whole, sliced = encoder.preprocess(texts), text_batches.in_slices(encoder.preprocess, texts)
        assert whole.keys() == sliced.keys()
        for name, value in whole.items():
            assert torch.equal(value, sliced[name]) if isinstance(value, torch.Tensor) else value == sliced[name]


@pytest.mark.parametrize("max_len", [None, 3])
def test_static_tokens_by_words_are_the_models_own(max_len: int | None) -> None:
    """The collator's tokens of a static model equal those of its own preprocessing, with prompts and truncation."""
    import tokenizers

    vocabulary = {word: at for at, word in enumerate(["[UNK]", *WORDS, "##s"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.normalizer = tokenizers.normalizers.BertNormalizer()
    words.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if max_len is not None:
        words.enable_truncation(max_len)
    model = library.SentenceTransformer(modules=[modules.StaticEmbedding(words, embedding_dim=4)], device="cpu")
    texts = [" ".join(WORDS[:5]), "", "  ", f"{WORDS[2].upper()}s, {WORDS[3]}", "\u00e9 \u6f22\u5b57", WORDS[1] * 30]
    quick = text_batches.preprocessing(model)
    assert "by_words" in repr(quick)
    for prompt in (None, "", f"{WORDS[0]}: "):
        whole, made = model.preprocess(texts, prompt=prompt), quick(texts, prompt=prompt)
        assert whole.keys() == made.keys()
        assert all(torch.equal(whole[name], made[name]) for name in whole)
    assert model[0].tokenizer.truncation == words.truncation


def test_the_gradient_cache_repeats_dropout(tmp_path: Path, dataset: Any) -> None:
    """With dropout, both passes over a chunk draw the same mask: the gradient is that of the vectors in the loss."""
    model = library.SentenceTransformer(str(tiny_bert(tmp_path / "bert", dropout=0.5)), device="cpu").train()
    rows = dataset.select(range(4))
    features = batch(model, rows["anchor"], rows["positive"])
    loss = NegativesLoss(model, dataset, tau=TAU, chunk=4)
    seen: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda *given: seen.append(given[2]["sentence_embedding"].detach().clone()))
    loss(features, None).backward()
    assert len(seen) == 4
    assert not torch.equal(seen[0], model(dict(features[0]))["sentence_embedding"])
    torch.testing.assert_close(seen[0], seen[2])
    torch.testing.assert_close(seen[1], seen[3])


def test_symmetric_is_the_librarys_own(model: Any) -> None:
    """Uncorrected, on distinct texts, Symmetric() is MultipleNegativesRankingLoss in both directions."""
    columns = ["red", "blue hat", "old lamp"], ["shoe", "hat", "lamp"]
    rows = {"anchor": columns[0], "positive": columns[1]}
    ours = NegativesLoss(model, rows, lambda data: InBatch(exclude="positive"), Symmetric(), tau=TAU)
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs = losses.MultipleNegativesRankingLoss(model, scale=1 / TAU, **both)
    features = batch(model, *columns)
    assert gradient(model, ours, features)[0] == pytest.approx(gradient(model, theirs, features)[0], rel=1e-5)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", ["in batch", "drawn"])
def test_inside_matryoshka(model: Any, dataset: Any, name: str, chunk: int | None) -> None:
    """MatryoshkaLoss around the loss gives its weighted sum over cut vectors, computed by hand from encoded texts."""
    rows = dataset.select(range(9))
    features = batch(model, rows["anchor"], rows["positive"])
    inner = NegativesLoss(model, dataset, NEGATIVES[name], tau=TAU, chunk=chunk)
    found, grads = gradient(model, losses.MatryoshkaLoss(model, inner, [16, 4], [1, 0.5]), features)
    whole = NegativesLoss(model, dataset, NEGATIVES[name], tau=TAU)
    want, total = 0.0, torch.zeros_like(grads)
    for dim, weight in ((16, 1), (4, 0.5)):
        short = library.SentenceTransformer(modules=[*model, Short(dim)], device="cpu")
        short.preprocess = model.preprocess
        whole.model, whole.width = short, dim
        value, part = gradient(short, whole, features)
        want, total = want + weight * value, total + weight * part
    assert found == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(grads, total, rtol=1e-3, atol=1e-6)


class Short(torch.nn.Module):
    """A module that cuts vectors."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {**features, "sentence_embedding": features["sentence_embedding"][:, : self.dim]}


def test_matryoshka_of_ours_is_theirs(model: Any, dataset: Any) -> None:
    """loss=Matryoshka((4,)) is MatryoshkaLoss over 16 and 4 dimensions, whose sum is twice our mean."""
    rows = dataset.select(range(9))
    features = batch(model, rows["anchor"], rows["positive"])
    theirs = losses.MatryoshkaLoss(model, NegativesLoss(model, dataset, tau=TAU), [16, 4])
    found = gradient(model, NegativesLoss(model, dataset, loss=Matryoshka((4,)), tau=TAU), features)
    want = gradient(model, theirs, features)
    assert 2 * found[0] == pytest.approx(want[0], rel=1e-5)
    torch.testing.assert_close(2 * found[1], want[1], rtol=1e-3, atol=1e-6)
    kept = NegativesLoss(model, dataset, lambda data: QuantizedSoftmax(data.n_items, 16, 4, 2), tau=TAU)
    kept.refresh(0)
    with pytest.raises(UserError, match="Matryoshka"):
        losses.MatryoshkaLoss(model, kept, [8])(features, None)


def test_several_positives_of_an_anchor(model: Any) -> None:
    """Of two positive columns every text but an empty one is a row; an anchor's positives do not count against it."""
    rows = {"a": ["red", "blue hat", "old lamp"], "p": ["shoe", "hat", "lamp"], "p2": ["coat", "", "wool"]}
    loss = NegativesLoss(model, rows, lambda data: InBatch(exclude="known"), tau=TAU, positives=2)
    found = float(loss(batch(model, *rows.values())).detach())
    pairs = [(0, "shoe"), (0, "coat"), (1, "hat"), (2, "lamp"), (2, "wool")]
    anchors, texts = (
        torch.from_numpy(model.encode(t, normalize_embeddings=True)) for t in (rows["a"], [t for _, t in pairs])
    )
    scores = anchors @ texts.T / TAU
    want = []
    for at, (anchor, _) in enumerate(pairs):
        others = [j for j, (other, _) in enumerate(pairs) if other != anchor]
        want.append(scores[anchor, [at, *others]].logsumexp(0) - scores[anchor, at])
    assert found == pytest.approx(float(sum(want)) / 5, rel=1e-4)
    with pytest.raises(UserError, match="2 columns of positives"):
        NegativesLoss(model, {"a": ["red"], "p": ["hat"]}, positives=2)


@pytest.mark.parametrize("kind", ["bert", "static"])
def test_ids_come_with_the_batch(model: Any, dataset: Any, kind: str) -> None:
    """The collator passes ids, so that prompts need not be repeated; the loss is that of ids found by tokens."""
    model = model if kind == "bert" else static()
    args = type("Args", (), {"prompts": {"anchor": "new "}, "router_mapping": {}})
    loss = NegativesLoss(model, dataset, NEGATIVES["drawn"], tau=TAU)
    collate = TextIds(loss, args)
    rows = [dataset[at] for at in range(12)]
    made = collate(rows)
    assert loss.prompts == ("new ", None)
    data = pairs_of(dataset)
    assert made["anchor_text_ids"].tolist() == data.queries[:12].tolist()
    assert made["positive_text_ids"].tolist() == data.items[:12].tolist()
    features = [
        {k.removeprefix(f"{c}_"): x for k, x in made.items() if k.startswith(c)} for c in ("anchor", "positive")
    ]
    by_tokens = NegativesLoss(model, dataset, NEGATIVES["drawn"], tau=TAU, prompts=("new ", None))
    plain = [{k: x for k, x in column.items() if k != "text_ids"} for column in features]
    assert float(loss(features).detach()) == pytest.approx(float(by_tokens(plain).detach()), rel=1e-6)
    with pytest.raises(UserError, match=r"anchor 'nowhere' is not in the dataset"):
        collate([{"anchor": "nowhere", "positive": rows[0]["positive"]}])


def test_lists_are_refreshed_before_each_epoch(model: Any, dataset: Any, tmp_path: Path) -> None:
    """With the callback, ANCE's lists are the nearest items of the model at the start of the last epoch, by a loop."""
    loss = NegativesLoss(
        model, dataset, lambda data: Union(in_batch(data), NearestItems(data.n_queries, 2, 3, every=1))
    )
    data, before = loss.data, []

    refresh = loss.refresh

    def watched(epoch: int) -> None:
        before.append(model.encode([*data.query_ids.ids, *data.item_ids.ids], normalize_embeddings=True))
        refresh(epoch)

    loss.refresh = watched  # type: ignore[method-assign]
    trained(model, dataset, loss, tmp_path, callbacks=[refreshing(loss)], num_train_epochs=2)
    assert len(before) == 2
    (nearest,) = [part for part in loss.modules() if isinstance(part, NearestItems)]
    for query in range(data.n_queries):
        scores = before[1][data.n_queries :] @ before[1][query]
        known = set(data.items[data.queries == query].tolist())
        best = [item for item in np.argsort(-scores, kind="stable") if item not in known][:3]
        assert nearest.lists[query].tolist() == best


def test_batches_of_similar_anchors(model: Any, dataset: Any, tmp_path: Path) -> None:
    """From the second epoch on, rows of one cluster share a batch; every row comes once per epoch."""
    loss = NegativesLoss(model, dataset)
    seen: list[list[int]] = []
    collate = TextIds(loss)

    def watched(rows: list[dict[str, Any]]) -> dict[str, Any]:
        made = collate(rows)
        seen.append(made["anchor_text_ids"].tolist())
        return made

    watched.valid_label_columns = collate.valid_label_columns  # type: ignore[attr-defined]
    trained(
        model,
        dataset,
        loss,
        tmp_path,
        callbacks=[refreshing(loss)],
        collator=watched,
        num_train_epochs=2,
        batch_sampler=Clustered(loss, size=10, start=1, every=1),
        per_device_train_batch_size=10,
        save_strategy="epoch",
    )
    assert loss.batches is not None
    assert sorted(chain(*seen[:4])) == sorted(chain(*seen[4:8])) == sorted(loss.row_queries.tolist())
    cluster = loss.batches.cluster
    assert len(set(cluster.tolist())) == 4
    rows = {int(c): sorted(loss.row_queries[(cluster == c).numpy()].tolist()) for c in cluster.unique()}
    assert sorted(sorted(batch) for batch in seen[4:8]) == sorted(rows.values())


def test_a_resumed_training_continues_the_negatives(folder: Path, dataset: Any, tmp_path: Path) -> None:
    """A training resumed from a checkpoint ends with the lists and the vectors of an uninterrupted one."""

    def made() -> tuple[Any, NegativesLoss]:
        model = library.SentenceTransformer(str(folder), device="cpu")
        nearest = NegativesLoss(model, dataset, lambda data: NearestItems(data.n_queries, 2, 3, every=2))
        return model, nearest

    ends = []
    for resume in (None, str(tmp_path / "run" / "checkpoint-5")):
        model, loss = made()
        arguments = {
            "save_strategy": "steps",
            "save_steps": 5,
            "num_train_epochs": 2,
            "per_device_train_batch_size": 10,
        }
        trained(model, dataset, loss, tmp_path / "run", callbacks=[refreshing(loss)], resume=resume, **arguments)
        ends.append((model.encode(WORDS), loss.negatives.lists.clone()))
    assert (ends[0][1] >= 0).any()
    assert torch.equal(ends[0][1], ends[1][1])
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-5, atol=1e-6)


def test_two_ranks_train_what_one_process_trains(folder: Path, tmp_path: Path) -> None:
    """Two gloo ranks with batches of 8 give the weights of one process with batches of 16: in-batch negatives, drawn
    ones in both directions with a gradient cache, and mined ones in clustered batches."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    script = Path(__file__).parent.parent / "support" / "text_ranks.py"
    command = [sys.executable, str(script), str(folder), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = all_trained(str(folder), tmp_path, 1), json.loads((tmp_path / "2.json").read_text())
    assert one.keys() == two.keys()
    for name in one:
        # Adam divides by the size of a gradient, so sums in another order move a small one by more than rounding; in
        # six steps a weight moves by up to 0.06
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)
    start = F.normalize(torch.from_numpy(library.SentenceTransformer(str(folder), device="cpu").encode(WORDS)), dim=1)
    assert all(np.abs(np.array(vectors) - start.numpy()).max() > 1e-3 for vectors in one.values())
