"""For users of sentence-transformers: any negatives as a loss of its trainer, and hard negatives in its data format.

loss = NegativesLoss(model, dataset)                                                      # corrected in-batch negatives
loss = NegativesLoss(model, dataset, lambda data: Resample(InBatch(item_frequency(data))))    # BIR
SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.errors import UserError
from sparring.core.part import Part, listeners
from sparring.core.types import Candidates, Outcome, Positives, Provenance, Step
from sparring.data.interactions import Interactions, Vocabulary
from sparring.evaluation.ranking import top_k
from sparring.losses import Loss, sampled_softmax
from sparring.negatives import InBatch, Negatives, Popularity

_BASE = 6364136223846793005  # odd, so that multiplication modulo 2^64 is invertible
_BATCH = 1024  # texts tokenised at a time
_LABELS = ("label", "labels", "score", "scores", "dataset_name")  # columns without texts


def in_batch(data: Interactions) -> Negatives:
    """The other positives of the batch, corrected by frequency (logQ); known positives of an anchor are excluded."""
    return InBatch(Popularity(torch.from_numpy(data.counts())), exclude="known")


class NegativesLoss(nn.Module):
    """A loss for sentence-transformers with Sparring's negatives.

    `dataset` is the training data: anchors in its first column, positives in its second, hard negatives in any others,
    as sentence-transformers expects. The distinct positives are the catalogue. `negatives` builds any Negatives from
    the pairs as Interactions (anchors are queries), so draws from the catalogue, corrections by popularity and
    exclusion of known positives all work. Texts are recognised by their tokens: pass the `prompts` of anchors and
    positives if the trainer uses any. Hard negatives of the dataset are shared by the batch, uncorrected. Scores are
    cosines over `tau`.

    Negatives that are rebuilt from the complete catalogue before each epoch are refused: only Sparring's loop does
    that.

        loss = NegativesLoss(model, dataset, lambda data: Union(in_batch(data), Sampled(Uniform(data.n_items), 256)))
    """

    def __init__(
        self,
        model: Any,
        dataset: Any,
        negatives: Callable[[Interactions], Negatives] = in_batch,
        loss: Loss = sampled_softmax,
        tau: float = 0.05,
        prompts: tuple[str | None, str | None] = (None, None),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not tau > 0:
            raise UserError(f"tau is {tau}; it must be positive")
        self.model, self.loss, self.tau, self.prompts, self.seed = model, loss, tau, prompts, seed
        self.data = pairs_of(dataset)
        self.negatives = negatives(self.data)
        for part in listeners(self.negatives, "refresh"):
            raise UserError(
                f"{type(part).__name__} is rebuilt from the catalogue before each epoch: train with `sparring train`"
            )
        positives = self.data.positives()
        self.register_buffer("start", positives.start, persistent=False)
        self.register_buffer("items", positives.items, persistent=False)
        for side, ids in (("query", self.data.query_ids), ("item", self.data.item_ids)):
            keys, order = self._keys_of(ids.ids.to_list(), self._prompt(side)).sort(stable=True)
            self.register_buffer(f"{side}_keys", keys, persistent=False)
            self.register_buffer(f"{side}_order", order, persistent=False)
        self._generators: dict[torch.device, torch.Generator] = {}

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; in training the negatives then observe it (a cache, a memory)."""
        features = list(sentence_features)
        if len(features) < 2:
            raise UserError(f"the dataset has {len(features)} columns of text: give anchors and positives")
        q, v, *given = [self._embed(columns) for columns in features]
        query_ids, item_ids = self._ids(features[0], "query"), self._ids(features[1], "item")
        known = Positives(self.get_buffer("start"), self.get_buffer("items"))
        tau = torch.tensor(self.tau, device=q.device)
        step = Step(query_ids, item_ids, q, v, tau, self.encode_items, self._generator(q.device), known)
        bag = self.negatives(step)
        for columns, vectors in zip(features[2:], given, strict=True):
            ids = self._ids(columns, "item", strict=False)
            block = Candidates(
                ids,
                vectors,
                torch.zeros(len(ids), device=q.device),
                known.of(query_ids),
                provenance=Provenance("hard negatives given"),
            )
            bag = replace(bag, blocks=(*bag.blocks, block))
        losses = self.loss(step, bag)
        if torch.is_grad_enabled():
            with torch.no_grad():
                for part in self._observers():
                    part.observe(step, Outcome(losses.detach(), (bag,)))
        return losses.mean()

    def encode_items(self, ids: Tensor) -> Tensor:
        """Vectors (..., D) of positives of the catalogue; each distinct one is encoded once."""
        distinct, which = torch.unique(ids, return_inverse=True)
        texts = self.data.item_ids.decode(distinct.cpu()).tolist()
        features = self.model.preprocess(texts, prompt=self.prompts[1])
        return F.embedding(
            which, self._embed({k: x.to(ids.device) if isinstance(x, Tensor) else x for k, x in features.items()})
        )

    def get_config_dict(self) -> dict[str, Any]:
        """The entries of this loss in the model card of sentence-transformers."""
        loss = getattr(self.loss, "__name__", type(self.loss).__name__)
        return {"negatives": type(self.negatives).__name__, "loss": loss, "tau": self.tau}

    def _observers(self) -> list[Part]:
        parts = nn.ModuleList([self.negatives, *([self.loss] if isinstance(self.loss, nn.Module) else [])])
        return listeners(parts, "observe")

    def _embed(self, features: Mapping[str, Any]) -> Tensor:
        return F.normalize(self.model(dict(features))["sentence_embedding"].float(), dim=-1)

    def _prompt(self, side: str) -> str | None:
        return self.prompts[0] if side == "query" else self.prompts[1]

    def _ids(self, features: Mapping[str, Tensor], side: str, strict: bool = True) -> Tensor:
        """Dense ids (B,) of the texts of a column by their tokens; -1 for unknown texts unless `strict`."""
        keys, asked = self.get_buffer(f"{side}_keys"), row_keys(features["input_ids"], features["attention_mask"])
        place = torch.searchsorted(keys, asked).clamp(max=len(keys) - 1)
        ids = torch.where(keys[place] == asked, self.get_buffer(f"{side}_order")[place], -1)
        if strict and bool((ids < 0).any()):
            which = "an anchor" if side == "query" else "a positive"
            raise UserError(
                f"{which} of this batch is not in the dataset of NegativesLoss: "
                "pass it all rows and the trainer's prompts"
            )
        return ids

    def _keys_of(self, texts: list[str], prompt: str | None) -> Tensor:
        keys = []
        for start in range(0, len(texts), _BATCH):
            features = self.model.preprocess(texts[start : start + _BATCH], prompt=prompt)
            keys.append(row_keys(features["input_ids"], features["attention_mask"]))
        return torch.cat(keys)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def row_keys(tokens: Tensor, mask: Tensor) -> Tensor:
    """A 64-bit hash (B,) of each row's tokens, independent of its padding."""
    place = mask.long().cumsum(1)
    powers = torch.full((tokens.shape[1] + 1,), _BASE, dtype=torch.long, device=tokens.device)
    powers[0] = 1
    return ((tokens.long() + 1) * powers.cumprod(0)[place] * mask.long()).sum(1)


def pairs_of(dataset: Any) -> Interactions:
    """The pairs of a dataset (`datasets.Dataset` or mapping of columns): one pair per row, distinct texts as ids."""
    names = [name for name in getattr(dataset, "column_names", None) or list(dataset) if name not in _LABELS]
    if len(names) < 2:
        listed = ", ".join(names) or "none"
        raise UserError(f"the dataset has the columns {listed}: pass anchors and positives, in this order")
    columns = [pl.Series(list(dataset[name]), dtype=pl.String) for name in names[:2]]
    if not len(columns[0]) or any(column.null_count() for column in columns):
        raise UserError(f"the dataset needs at least one row, and a text in {names[0]} and {names[1]} of every row")
    anchors, positives = (Vocabulary(column) for column in columns)
    rows = [ids.encode(column).astype(np.int32) for ids, column in zip((anchors, positives), columns, strict=True)]
    return Interactions(rows[0], rows[1], anchors, positives)


def hard_negatives(
    model: Any,
    dataset: Any,
    n: int = 5,
    *,
    skip: int = 0,
    pool: int = 100,
    margin: float | None = None,
    how: Literal["top", "draw"] = "top",
    tau: float = 0.05,
    seed: int = 0,
) -> pl.DataFrame:
    """Rows (anchor, positive, negative_1 .. negative_n) for sentence-transformers, one per row of the dataset.

    Candidates are the positives of other anchors, ranked exactly by the cosine to the anchor. Known positives of the
    anchor are excluded, then the first `skip` candidates; the next `pool` remain, with `margin` only those that score
    at least that much below the positive. how="top" takes the first n of them; "draw" draws n without replacement in
    proportion to exp(cosine / tau), as BIR does from a batch. Rows with fewer than n candidates are dropped. `model` is
    a SentenceTransformer, or a run (`sparring.load`) with text towers.

        hard_negatives(model, dataset, n=5, skip=3).write_ndjson("mined.jsonl")
        load_dataset("json", data_files="mined.jsonl")
    """
    if n < 1 or skip < 0 or pool < n:
        raise UserError(f"n={n}, skip={skip}, pool={pool}: n must be at least 1, skip at least 0, pool at least n")
    data = pairs_of(dataset)
    queries, items = (
        _vectors(model, data.query_ids.ids.to_list(), "query"),
        _vectors(model, data.item_ids.ids.to_list(), "item"),
    )
    everyone = torch.arange(data.n_queries, device=items.device)
    known = data.positives().to(items.device)
    scores, ids = top_k(queries, items, min(skip + pool, data.n_items), known, everyone)
    pair_queries, pair_items = (column.long().to(items.device) for column in data.pairs())
    scores, ids = scores[:, skip:][pair_queries], ids[:, skip:][pair_queries]
    usable = ids >= 0
    if margin is not None:
        positive = (queries[pair_queries] * items[pair_items]).sum(1, keepdim=True)
        usable &= scores < positive - margin
    order = scores
    if how == "draw":  # the largest logits with Gumbel noise are a draw without replacement
        uniform = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)).to(scores.device)
        order = scores / tau - torch.log(-torch.log(uniform.clamp(min=1e-20)))
    best = order.masked_fill(~usable, -torch.inf).topk(min(n, order.shape[1]), dim=1).indices
    full = (usable.sum(1) >= n).cpu().numpy()
    chosen = data.item_ids.decode(ids.gather(1, best).cpu().numpy()[full])
    table = {"anchor": data.query_ids.decode(data.queries[full]), "positive": data.item_ids.decode(data.items[full])}
    return pl.DataFrame({**table, **{f"negative_{j + 1}": chosen[:, j] for j in range(n if full.any() else 0)}})


def _vectors(model: Any, texts: Sequence[str], side: Literal["query", "item"]) -> Tensor:
    """Vectors (n, D) of length 1."""
    if hasattr(model, "encode_texts"):
        vectors: Tensor = model.encode_texts(texts, side)
    else:
        encode = model.encode_query if side == "query" else model.encode_document
        vectors = encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
    return F.normalize(vectors.float(), dim=-1)
