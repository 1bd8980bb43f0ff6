"""Parts of SentenceTransformerTrainer beside NegativesLoss: a collator, a callback and a batch sampler.

args = SentenceTransformerTrainingArguments("out", batch_sampler=Clustered(loss, size=8), prompts={"query": "query: "})
SentenceTransformerTrainer(model, args, dataset, loss=loss, data_collator=TextIds(loss, args),
                           callbacks=[refreshing(loss)]).train()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sparring.core.errors import UserError
from sparring.core.extras import optional
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.training.sentence_transformers import TEXT_IDS, NegativesLoss
from sparring.training.text_batches import preprocessing

_STATE = "negatives.safetensors"  # in a checkpoint of the trainer


def _library(module: str) -> Any:
    return optional(module, "sentence-transformers", "training with sentence-transformers")


class TextIds:
    """A data collator that passes the id of every text beside its tokens, so that NegativesLoss need not look it up.

    Prompts and routes are those of the training arguments; the loss then uses the same prompts for texts that it draws.
    Needed for texts that differ only beyond the model's maximum length.

        SentenceTransformerTrainer(..., loss=loss, data_collator=TextIds(loss, args))
    """

    def __init__(self, loss: NegativesLoss, args: Any = None) -> None:
        collator = _library("sentence_transformers.sentence_transformer.data_collator")
        prompts = getattr(args, "prompts", None)
        self.collator = collator.SentenceTransformerDataCollator(
            preprocess_fn=preprocessing(loss.model),
            router_mapping=getattr(args, "router_mapping", None) or {},
            prompts=prompts or {},
        )
        self.valid_label_columns = self.collator.valid_label_columns
        self.positives, self.loss = loss.n_positives, loss
        self.known = [
            {text: at for at, text in enumerate(ids.ids.to_list())} for ids in (loss.data.query_ids, loss.data.item_ids)
        ]
        if isinstance(prompts, str):
            loss.prompts = prompts, prompts

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self.collator(rows)
        names = [name for name in rows[0] if name not in (*self.valid_label_columns, "dataset_name")]
        prompts = self.collator.prompts
        if isinstance(prompts, dict) and len(names) > 1:
            self.loss.prompts = prompts.get(names[0]), prompts.get(names[1])
        for at, name in enumerate(names):
            texts = [row[name] for row in rows]
            ids = [self.known[at > 0].get(text, -1) for text in texts]
            if -1 in ids and (at == 0 or at <= self.positives == 1):
                text = texts[ids.index(-1)]
                raise UserError(f"{name} {text!r:.80} is not in the dataset of NegativesLoss: pass it all rows")
            batch[f"{name}_{TEXT_IDS}"] = torch.tensor(ids)
        return batch


def refreshing(loss: NegativesLoss) -> Any:
    """A TrainerCallback: before each epoch it lets the negatives rebuild their state from the complete catalogue.

    Needed for ANCE, MIDX and clustered batches. Checkpoints of the trainer then also hold the state of the negatives,
    and a resumed training continues with it.

        SentenceTransformerTrainer(..., loss=loss, callbacks=[refreshing(loss)])
    """
    transformers = _library("transformers")

    class Refreshing(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            saved = _folder(args, state) / _STATE
            if state.global_step and saved.is_file():
                loss.load_state(saved)

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            epoch = state.epoch or 0.0
            if not loss.refreshed or abs(epoch - round(epoch)) < 1e-6:  # not where an epoch is resumed
                loss.refresh(round(epoch) if abs(epoch - round(epoch)) < 1e-6 else int(epoch))

        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.is_world_process_zero:
                loss.save_state(_folder(args, state) / _STATE)

    return Refreshing()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class Clustered:
    """A `batch_sampler` of the training arguments: batches of similar anchors, as in NGAME.

    Anchors are clustered by the vectors that they had in their last step, from epoch `start` on, again every `every`
    epochs, into clusters of about `size` rows, twice as large from each epoch in `grow`. It needs `refreshing(loss)`
    among the callbacks. Evaluation keeps the trainer's own order.

        SentenceTransformerTrainingArguments(..., batch_sampler=Clustered(loss, size=8))

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023, section 3.
    """

    def __init__(
        self, loss: NegativesLoss, size: int = 8, start: int = 1, every: int = 5, grow: Sequence[int] = ()
    ) -> None:
        if start < 1:
            raise UserError(
                f"start is {start}; in the first epoch no anchor has a vector yet, so it must be at least 1"
            )
        self.loss: NegativesLoss | None = loss
        self.size, self.start, self.every, self.grow = size, start, every, tuple(grow)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "loss": None}  # the trainer writes its arguments into every checkpoint

    def __call__(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool,
        valid_label_columns: list[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> Any:
        samplers, loss = _library("sentence_transformers.base.sampler"), self.loss
        if loss is None:
            raise UserError("these training arguments were read from a checkpoint: make Clustered(loss) anew")
        common = {"batch_size": batch_size, "drop_last": drop_last, "generator": generator, "seed": seed}
        if len(dataset) != len(loss.row_queries):  # the evaluation set
            return samplers.DefaultBatchSampler(range(len(dataset)), **common)
        queries = torch.from_numpy(loss.row_queries).long()
        batches = ClusteredBatches(
            queries, loss.data.n_queries, loss.width, batch_size, seed, self.size, self.start, self.every, self.grow
        )
        loss.batches = batches.to(loss.get_buffer("start").device)

        class ClusteredBatchSampler(samplers.DefaultBatchSampler):  # type: ignore[misc, name-defined]
            def __iter__(self) -> Iterator[list[int]]:
                for rows in batches.epoch(self.epoch):
                    if len(rows) == batch_size or not drop_last:
                        yield rows.tolist()

        return ClusteredBatchSampler(range(len(loss.row_queries)), **common)
