"""Trainings with sentence-transformers for tests; as a script, one rank of a comparison of two ranks with one process:
python text_ranks.py MODEL OUT WORLD, with the environment that torchrun sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.texts import WORDS


def rows_of(n: int) -> dict[str, list[str]]:
    """n pairs of 12 anchors and 9 positives, with popular positives, several per anchor, and repeated pairs."""
    draw = np.random.default_rng(1)
    anchors = [f"{WORDS[i]} {WORDS[(i * 5 + 3) % 16]}" for i in range(12)]
    positives = [f"{WORDS[15 - i]} {WORDS[(i * 3 + 1) % 16]} {WORDS[i]}" for i in range(9)]
    rows = [(anchors[draw.integers(12)], positives[min(int(draw.exponential(3)), 8)]) for _ in range(n)]
    return {"anchor": [a for a, _ in rows], "positive": [p for _, p in rows]}


def trained(
    model: Any,
    dataset: Any,
    loss: Any,
    folder: Path,
    callbacks: Any = None,
    collator: Any = None,
    resume: str | None = None,
    **arguments: Any,
) -> float:
    """The loss that a real SentenceTransformerTrainer reports."""
    import sentence_transformers as library

    given = {"learning_rate": 1e-2, "per_device_train_batch_size": 16, "save_strategy": "no", **arguments}
    args = library.SentenceTransformerTrainingArguments(
        str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **given
    )
    trainer = library.SentenceTransformerTrainer(
        model=model, args=args, train_dataset=dataset, loss=loss, callbacks=callbacks, data_collator=collator
    )
    return float(trainer.train(resume_from_checkpoint=resume).training_loss)


def main(folder: str, out: Path, world: int) -> None:
    import datasets
    import sentence_transformers as library

    from sparring.losses import Symmetric
    from sparring.negatives import NearestItems, QuantizedSoftmax, Sampled, Uniform, Union
    from sparring.training.sentence_transformers import NegativesLoss, in_batch
    from sparring.training.text_trainer import clustered, refreshing, text_ids

    dataset = datasets.Dataset.from_dict(rows_of(64))
    cases: dict[str, Any] = {
        "in batch": (in_batch, {}),
        "cached": (lambda data: Union(in_batch(data), Sampled(Uniform(data.n_items), 4)), {"chunk": 3}),
        "symmetric": (in_batch, {"loss": Symmetric(), "chunk": 5}),
        "mined": (lambda data: Union(in_batch(data), NearestItems(data.n_queries, 1, 3, every=1)), {}),
        "midx": (lambda data: QuantizedSoftmax(data.n_items, 16, 4, 2), {"chunk": 4}),
    }
    found = {}
    for name, (negatives, settings) in cases.items():
        model = library.SentenceTransformer(folder, device="cpu")
        loss = NegativesLoss(model, dataset, negatives, tau=0.1, **settings)
        more = {"batch_sampler": clustered(loss, size=4, every=1)} if name == "mined" else {}
        trained(
            model,
            dataset,
            loss,
            out / f"{name}{world}",
            [refreshing(loss)],
            text_ids(loss),
            max_steps=6,
            per_device_train_batch_size=16 // world,
            **more,
        )
        found[name] = model.encode(WORDS, normalize_embeddings=True).tolist()
    (out / f"{world}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
