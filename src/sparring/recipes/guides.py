"""Guides by name: the model itself, vectors, a table of scores, an item graph, an encoder or a cross-encoder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.data.modalities.vector_files import id_vectors
from sparring.data.scores import is_graph, read_graph, read_scores
from sparring.data.texts.texts import ROLES, text_of
from sparring.models.scorers import is_cross_encoder, pair_scores, text_vectors
from sparring.negatives import Guide, OwnScores, RelatedItems, ScoreFunction, TableScores, VectorScores

OWN = "own"
TABLES = (".parquet", ".pq", ".csv", ".tsv", ".jsonl")


def open_guide(name: str, data: Interactions) -> Guide:
    """The guide of this name for the queries and items of the data.

        own              the model's own scores
        Q.npy+I.npy      vectors of queries and items; Q.npy:IDS names the ids of the rows
        FILE             a table of scores (query, item, score), or an item graph (item, related)
        FOLDER           a cross-encoder, or an encoder in a folder of sentence-transformers
        bag, minilm ...  an encoder of text towers

    Encoders and cross-encoders read the texts of the data. A table must have the score of every training pair: a bound
    that is relative to the positive's score would otherwise drop nothing.
    """
    if name == OWN:
        return OwnScores()
    if ".npy" in name:
        queries, plus, items = name.partition("+")
        if not plus:
            raise UserError(f"guide={name} names one file of vectors: give those of queries and items as Q.npy+I.npy")
        vectors = id_vectors(queries, data.query_ids, "query"), id_vectors(items, data.item_ids, "item")
        return VectorScores(torch.from_numpy(vectors[0]), torch.from_numpy(vectors[1]))
    if name.endswith(TABLES):
        return _table(Path(name), data)
    texts = {role: text_of(data, role).to_list() for role in ROLES}
    if is_cross_encoder(name):
        score = pair_scores(name)

        def of_pairs(queries: Tensor, items: Tensor) -> object:
            pairs = zip(queries.tolist(), items.tolist(), strict=True)
            return score([(texts["query"][query], texts["item"][item]) for query, item in pairs])

        return ScoreFunction(of_pairs)
    encode = text_vectors(name)
    return VectorScores(encode(texts["query"], "query"), encode(texts["item"], "item"))


def _table(path: Path, data: Interactions) -> Guide:
    if is_graph(path):
        return RelatedItems(*(torch.from_numpy(end) for end in read_graph(path, data)))
    listed, of, scores = read_scores(path, data)
    guide = TableScores(torch.from_numpy(listed), torch.from_numpy(of), torch.from_numpy(scores))
    queries, items = data.pairs()
    unknown = guide.look_up(queries, items.unsqueeze(1)).isnan().flatten()
    if bool(unknown.any()):
        first = int(unknown.int().argmax())
        pair = f"query {data.query_ids.ids[int(queries[first])]} and item {data.item_ids.ids[int(items[first])]}"
        count = f"{int(unknown.sum()):,} of {len(queries):,} training pairs, such as {pair}"
        raise UserError(f"{path} has no score for {count}: score every training pair too")
    return guide
