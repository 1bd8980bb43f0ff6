"""For users of sentence-transformers: any negatives as a loss of its trainer, and hard negatives in its data format.

loss = NegativesLoss(model, dataset)                                                      # corrected in-batch negatives
loss = NegativesLoss(model, dataset, lambda data: Resample(InBatch(item_frequency(data))))    # BIR
SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()

What a trainer needs beside the loss, such as a callback that refreshes ANCE's lists, is in text_trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.part import listeners, loss_output
from sparring.core.ranks import Group, UnevenGroup
from sparring.core.types import ALONE, Bag, Batch, Candidates, Corpus, Outcome, Positives, Provenance, Ranks, Step
from sparring.data.interactions import Interactions, Vocabulary
from sparring.evaluation.ranking import top_k
from sparring.losses import Loss, sampled_softmax
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.negatives import InBatch, Negatives, Popularity
from sparring.negatives.filtered import Bounds, first_left
from sparring.training.text_batches import Features, GradientCache, in_groups, text_keys

_BATCH = 1024  # texts tokenised at a time
_LABELS = ("label", "labels", "score", "scores", "dataset_name")  # columns without texts
TEXT_IDS = "text_ids"  # the feature in which a collator passes the ids of texts (text_trainer.py)


def in_batch(data: Interactions) -> Negatives:
    """The other positives of the batch, corrected by frequency (logQ); known positives of an anchor are excluded."""
    return InBatch(Popularity(torch.from_numpy(data.counts())), exclude="known")


class NegativesLoss(nn.Module):
    """A loss for sentence-transformers with Sparring's negatives.

    `dataset` is the training data: anchors in its first column, positives in its second, hard negatives in any others,
    as sentence-transformers expects. The distinct positives are the catalogue. `negatives` builds any Negatives from
    the pairs as Interactions (anchors are queries), so draws from the catalogue, corrections by popularity and
    exclusion of known positives all work. Hard negatives of the dataset are shared by the batch, uncorrected. Scores
    are cosines over `tau`.

        loss = NegativesLoss(model, dataset, lambda data: Union(in_batch(data), Sampled(Uniform(data.n_items), 256)))

    - `positives=2`: the second and third column are both positives. Each is a row of the batch with the same anchor; an
      empty text stands for none. The loss is the mean over these rows.
    - `chunk=64`: texts are encoded 64 at a time with a gradient cache, so that a batch of any size fits into memory,
      for a second forward pass.
    - Over several ranks, candidates of all ranks are gathered with their gradient: ranks train what one process would
      with their rows in one batch. `gather=False` keeps each rank to its own.
    - Negatives that are rebuilt from the catalogue before each epoch (ANCE, MIDX) need `refreshing(loss)` among the
      trainer's callbacks, and batches of similar anchors (NGAME) `Clustered(loss)` as its batch sampler.
    - Texts are recognised by their tokens: pass the `prompts` of anchors and positives if the trainer uses any. With
      `TextIds(loss, args)` as data collator the ids come with the batch, for prompts and any kind of model.
    - MatryoshkaLoss may wrap it. `loss=Matryoshka(dims)` is the same loss with a single draw of negatives, and works
      with negatives that compare or keep vectors.
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
        *,
        positives: int = 1,
        chunk: int | None = None,
        gather: bool = True,
    ) -> None:
        super().__init__()
        if not tau > 0:
            raise UserError(f"tau is {tau}; it must be positive")
        if positives < 1 or (chunk is not None and chunk < 1):
            raise UserError(f"positives and chunk must be at least 1, got {positives} and {chunk}")
        self.model, self.loss, self.tau, self.prompts, self.seed = model, loss, tau, prompts, seed
        self.n_positives, self.chunk, self.gather = positives, chunk, gather
        self.data = pairs_of(dataset, positives)
        self.row_queries = self.data.query_ids.encode(list(*_columns(dataset, 1).values()))
        self.negatives = negatives(self.data)
        self.batches: ClusteredBatches | None = None  # that Clustered makes
        self.refreshed = False
        self.width = int(model.get_embedding_dimension())
        known = self.data.positives()
        self.register_buffer("start", known.start, persistent=False)
        self.register_buffer("items", known.items, persistent=False)
        self._keys: dict[str, tuple[Tensor, Tensor]] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; in training the negatives then observe it (a cache, a memory)."""
        features = [dict(columns) for columns in sentence_features]
        if len(features) < 1 + self.n_positives:
            raise UserError(
                f"the dataset has {len(features)} columns of text: give anchors and {_columns_of(self.n_positives)}"
            )
        trains = torch.is_grad_enabled()
        if trains and not self.refreshed and listeners(self.parts(), "refresh"):
            name = type(listeners(self.parts(), "refresh")[0]).__name__
            raise UserError(f"{name} is rebuilt before each epoch: pass callbacks=[refreshing(loss)] to the trainer")
        ids = [self._ids(columns, "query" if at == 0 else "item", at) for at, columns in enumerate(features)]
        forward = self._forward()
        cache = GradientCache(self.model, forward, self.chunk) if self.chunk and trains else None
        encode = cache.encode if cache else self._columns_encoded
        q, *others = [encode(columns) for columns in features]
        rows = torch.arange(len(q), device=q.device)
        v, item_ids = others[0], ids[1]
        if self.n_positives > 1:
            v = torch.stack(others[: self.n_positives], 1).flatten(0, 1)
            item_ids = torch.stack(ids[1 : 1 + self.n_positives], 1).flatten()
            given = torch.nonzero(item_ids >= 0).squeeze(1)
            v, item_ids, rows = v[given], item_ids[given], given // self.n_positives
            q = q[rows]
        drawn = cache.encode if cache else partial(in_groups, forward)
        step = self._step(ids[0][rows], item_ids, q, v, drawn)
        bag = self._bag(step)
        for given_ids, vectors in zip(ids[1 + self.n_positives :], others[self.n_positives :], strict=True):
            ranks = self._ranks(len(given_ids), q.device)
            every, emb = (ranks.gather(x, _rows_of(ranks, x)) for x in (given_ids, vectors))
            words = Provenance("hard negatives given")
            block = Candidates(every, emb, emb.new_zeros(len(emb)), step.known(), provenance=words)
            bag = replace(bag, blocks=(*bag.blocks, block))
        output = loss_output(self.loss, step, bag)
        # DistributedDataParallel takes the mean over ranks, whose rows may differ in number
        mean = output.losses.sum() * step.batch.ranks.world / max(len(step.batch), 1)
        if trains and q.shape[-1] == self.width:
            with torch.no_grad():
                done = output._replace(losses=output.losses.detach())
                for part in listeners(self.parts(), "observe"):
                    part.observe(step, Outcome(done.losses, (bag,), (done,)))
        return mean if cache is None else cache.finish(mean, self.parts().parameters())

    def _step(self, query_ids: Tensor, item_ids: Tensor, q: Tensor, v: Tensor, encode: Callable[..., Tensor]) -> Step:
        ranks, width = self._ranks(len(q), q.device), q.shape[-1]

        def encode_items(ids: Tensor) -> Tensor:
            own = ranks.own(ids) if ids.dim() == 1 else ids
            vectors = _cut(self._items_encoded(own, encode, width), width)
            return ranks.gather(vectors, len(ids)) if ids.dim() == 1 else vectors

        whole = None
        if ranks.world > 1 or self.n_positives > 1:
            ids = ranks.gather(torch.stack([query_ids, item_ids], 1), _rows_of(ranks, q))
            whole = Batch(ids[:, 0], ids[:, 1], q, v, ranks, grouped=self.n_positives > 1)
        tau = torch.tensor(self.tau, device=q.device)
        known = Positives(self.get_buffer("start"), self.get_buffer("items"))
        return Step(query_ids, item_ids, q, v, tau, encode_items, self.generator(q.device), known, whole=whole)

    def _ranks(self, rows: int, device: torch.device) -> Ranks:
        """The ranks that share a batch, of which this one holds some rows; in training only."""
        gathers = self.gather and torch.is_grad_enabled() and _world() > 1
        return UnevenGroup(rows, device) if gathers else ALONE

    def _bag(self, step: Step) -> Bag:
        """The bag of the negatives; vectors that they keep are cut where MatryoshkaLoss cut the batch's."""
        width = step.q.shape[-1]
        try:
            bag: Bag = self.negatives(step)
        except (RuntimeError, ValueError) as error:
            if width == self.width:
                raise
            name = type(self.negatives).__name__
            raise UserError(
                f"{name} compares vectors of {self.width} dimensions, and MatryoshkaLoss cut them to {width}: "
                "pass loss=Matryoshka(dims) to NegativesLoss in its place"
            ) from error
        return replace(bag, blocks=tuple(replace(block, emb=_cut(block.emb, width)) for block in bag.blocks))

    def parts(self) -> nn.ModuleList:
        """Everything of the loss that may have state: negatives, the loss, batches of similar anchors."""
        some = (self.negatives, self.loss, self.batches)
        return nn.ModuleList([part for part in some if isinstance(part, nn.Module)])

    @torch.no_grad()
    def refresh(self, epoch: int) -> None:
        """Let all parts rebuild their state from the complete catalogue, before an epoch (from 0)."""
        self.refreshed = True
        parts = listeners(self.parts(), "refresh")
        if not parts:
            return
        model = self.model.module if hasattr(self.model, "module") else self.model
        ranks: Ranks = Group() if self.gather and _world() > 1 else ALONE
        device = next(model.parameters()).device
        known = Positives(self.get_buffer("start"), self.get_buffer("items"))

        def items() -> Tensor:
            every = torch.arange(self.data.n_items, device=device)
            return ranks.gather(self._texts_encoded(model, ranks.own(every), "item"), len(every))

        def queries(ids: Tensor) -> Tensor:
            return self._texts_encoded(model, ids, "query")

        training = model.training
        model.eval()
        try:
            corpus = Corpus(epoch, items, queries, known, self.generator(device), ranks)
            for part in parts:
                part.refresh(corpus)
                ranks.equalise(part.buffers())
        finally:
            model.train(training)

    def save_state(self, path: Path) -> None:
        """Write the state of all parts and of the generators to a file, for `load_state`."""
        state = {f"parts.{name}": tensor for name, tensor in files.tensors_of(self.parts()).items()}
        state |= {f"generator.{device}": made.get_state() for device, made in self._generators.items()}
        files.write_tensors(path, state)

    def load_state(self, path: Path) -> None:
        """Continue from a state that `save_state` wrote."""
        tensors, _ = files.read_tensors(path)
        parts = {name.removeprefix("parts."): t for name, t in tensors.items() if name.startswith("parts.")}
        files.load_tensors(self.parts(), parts, path)
        for name, state in tensors.items():
            if name.startswith("generator."):
                self.generator(torch.device(name.removeprefix("generator."))).set_state(state)
        self.refreshed = True

    def encode_items(self, ids: Tensor) -> Tensor:
        """Vectors (..., D) of positives of the catalogue; each distinct one is encoded once."""
        return self._items_encoded(ids, partial(in_groups, self._forward()), self.width)

    def get_config_dict(self) -> dict[str, Any]:
        """The entries of this loss in the model card of sentence-transformers."""
        loss = getattr(self.loss, "__name__", type(self.loss).__name__)
        return {"negatives": type(self.negatives).__name__, "loss": loss, "tau": self.tau}

    def _texts_encoded(self, model: Any, ids: Tensor, side: Literal["query", "item"]) -> Tensor:
        """Vectors of texts of one side without gradient, in evaluation mode."""
        if not len(ids):
            return torch.zeros(0, self.width, device=ids.device)
        texts = (self.data.query_ids if side == "query" else self.data.item_ids).decode(ids.cpu()).tolist()
        encode = model.encode_query if side == "query" else model.encode_document
        prompt = self.prompts[0 if side == "query" else 1] or ""  # None would take the model's default
        size = self.chunk or 64
        vectors: Tensor = encode(texts, prompt=prompt, convert_to_tensor=True, batch_size=size)
        return F.normalize(vectors.float(), dim=-1).to(ids.device)

    def _items_encoded(self, ids: Tensor, encode: Callable[[Features], Tensor], width: int) -> Tensor:
        if not ids.numel():
            return torch.zeros(*ids.shape, width, device=ids.device)
        distinct, which = torch.unique(ids, return_inverse=True)
        texts = self.data.item_ids.decode(distinct.cpu()).tolist()
        features = self.model.preprocess(texts, prompt=self.prompts[1])
        return F.embedding(
            which, encode({k: x.to(ids.device) if isinstance(x, Tensor) else x for k, x in features.items()})
        )

    def _columns_encoded(self, features: Features) -> Tensor:
        """Vectors of a column by the model; MatryoshkaLoss may have decorated it, and then keeps and cuts them."""
        return in_groups(lambda group: _unit(self.model(group)), features)

    def _forward(self) -> Callable[[Features], Tensor]:
        """Vectors by the model itself, at the width of the moment: MatryoshkaLoss would keep drawn texts for the next.

        The backward pass of a gradient cache comes when MatryoshkaLoss has restored the model.
        """
        forward: Callable[[Features], Mapping[str, Tensor]] = self.model
        width = self.width
        if type(self.model.forward).__name__ == "ForwardDecorator":  # of MatryoshkaLoss
            forward, width = self.model.forward.fn, int(self.model.forward.dim)
        return lambda features: _cut(_unit(forward(dict(features))), width)

    def _ids(self, features: Features, side: Literal["query", "item"], column: int) -> Tensor:
        """Dense ids (n,) of the texts of a column: the collator's, or by tokens; -1 for unknown hard negatives."""
        ids = features.pop(TEXT_IDS, None)
        if isinstance(ids, Tensor):
            return ids
        keys, order = self._known_keys(side, features["input_ids"].device)
        asked = text_keys(features)
        place = torch.searchsorted(keys, asked).clamp(max=len(keys) - 1)
        ids = torch.where(keys[place] == asked, order[place], -1)
        if column <= self.n_positives == 1 or column == 0:
            self._check(ids, "an anchor" if side == "query" else "a positive")
        return ids

    def _check(self, ids: Tensor, which: str) -> None:
        if bool((ids < 0).any()):
            raise UserError(
                f"{which} of this batch is not in the dataset of NegativesLoss: "
                "pass it all rows and the trainer's prompts"
            )

    def _known_keys(self, side: Literal["query", "item"], device: torch.device) -> tuple[Tensor, Tensor]:
        """The hashes of all texts of a side in ascending order, and their dense ids."""
        if side not in self._keys:
            texts = (self.data.query_ids if side == "query" else self.data.item_ids).ids.to_list()
            prompt, parts = self.prompts[0 if side == "query" else 1], []
            for first in range(0, len(texts), _BATCH):
                parts.append(text_keys(self.model.preprocess(texts[first : first + _BATCH], prompt=prompt)))
            keys, order = torch.cat(parts).sort(stable=True)
            self._keys[side] = keys, order
        keys, order = self._keys[side]
        if keys.device != device:
            keys, order = self._keys[side] = keys.to(device), order.to(device)
        return keys, order

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator that negatives draw from, the same on all ranks."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rows_of(ranks: Ranks, x: Tensor) -> int:
    """The rows of all ranks, of which this one holds x."""
    return ranks.ends[-1] if isinstance(ranks, UnevenGroup) else len(x)


def _unit(output: Mapping[str, Tensor]) -> Tensor:
    return F.normalize(output["sentence_embedding"].float(), dim=-1)


def _cut(vectors: Tensor, width: int) -> Tensor:
    """The first dimensions of vectors, scaled to length 1."""
    return vectors if vectors.shape[-1] == width else F.normalize(vectors[..., :width], dim=-1)


def _columns_of(positives: int) -> str:
    return "positives" if positives == 1 else f"{positives} columns of positives"


def _columns(dataset: Any, n: int) -> dict[str, Any]:
    """The first n columns of texts of a dataset (`datasets.Dataset` or mapping of columns)."""
    names = [name for name in getattr(dataset, "column_names", None) or list(dataset) if name not in _LABELS]
    if len(names) < n:
        listed = ", ".join(names) or "none"
        raise UserError(f"the dataset has the columns {listed}: pass anchors and {_columns_of(n - 1)}, in this order")
    return {name: dataset[name] for name in names[:n]}


def pairs_of(dataset: Any, positives: int = 1) -> Interactions:
    """The pairs of a dataset (`datasets.Dataset` or mapping of columns): one pair per row, distinct texts as ids.

    With several columns of positives, one pair for each of them; an empty text is none.
    """
    read = _columns(dataset, 1 + positives)
    first, *others = (pl.Series(list(column), dtype=pl.String) for column in read.values())
    anchors, texts = pl.concat([first] * positives), pl.concat(others)
    if positives > 1:
        given = texts.is_not_null() & (texts != "")
        anchors, texts = anchors.filter(given), texts.filter(given)
    if not len(texts) or anchors.null_count() or texts.null_count():
        names = " and ".join(read)
        raise UserError(f"the dataset needs at least one row, and a text in {names} of every row")
    queries, items = Vocabulary(first), Vocabulary(texts)
    return Interactions(queries.encode(anchors).astype(np.int32), items.encode(texts).astype(np.int32), queries, items)


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
    a SentenceTransformer, or a run (`sparring.load`) with text towers. Everything is in memory; `mine`
    (experiments/mining.py) takes a corpus, other guides and bounds, and writes files.

        hard_negatives(model, dataset, n=5, skip=3).write_ndjson("mined.jsonl")
        load_dataset("json", data_files="mined.jsonl")
    """
    if n < 1 or skip < 0 or pool < n:
        raise UserError(f"n={n}, skip={skip}, pool={pool}: n must be at least 1, skip at least 0, pool at least n")
    data = pairs_of(dataset)
    queries, items = (
        encoded(model, data.query_ids.ids.to_list(), "query"),
        encoded(model, data.item_ids.ids.to_list(), "item"),
    )
    everyone = torch.arange(data.n_queries, device=items.device)
    known = data.positives().to(items.device)
    scores, ids = top_k(queries, items, min(skip + pool, data.n_items), known, everyone)
    pair_queries, pair_items = (column.long().to(items.device) for column in data.pairs())
    scores, ids = scores[:, skip:][pair_queries], ids[:, skip:][pair_queries]
    left = ids >= 0
    if margin is not None:
        positive = (queries[pair_queries] * items[pair_items]).sum(1, keepdim=True)
        left &= ~Bounds(margin=margin).reached(scores, positive)["margin"]
    order = scores
    if how == "draw":  # the largest logits with Gumbel noise are a draw without replacement
        uniform = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)).to(scores.device)
        order = scores / tau - torch.log(-torch.log(uniform.clamp(min=1e-20)))
    best = first_left(order, left, ids, n)[0]
    full = ((best >= 0).sum(1) >= n).cpu().numpy()
    chosen = data.item_ids.decode(best.cpu().numpy()[full])
    table = {"anchor": data.query_ids.decode(data.queries[full]), "positive": data.item_ids.decode(data.items[full])}
    return pl.DataFrame({**table, **{f"negative_{j + 1}": chosen[:, j] for j in range(n if full.any() else 0)}})


def encoded(model: Any, texts: Sequence[str], side: Literal["query", "item"]) -> Tensor:
    """Vectors (n, D) of length 1 by a SentenceTransformer or a run with text towers, each with its own prompts."""
    if hasattr(model, "encode_texts"):
        vectors: Tensor = model.encode_texts(texts, side)
    else:
        encode = model.encode_query if side == "query" else model.encode_document
        vectors = encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
    return F.normalize(vectors.float(), dim=-1)
