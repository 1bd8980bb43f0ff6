"""Trainings with sentence-transformers for tests; as a script, by two ranks: python text_ranks.py MODEL OUT, with the
address and the port of a meeting in the environment."""

from __future__ import annotations

import json
import os
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


def cases() -> dict[str, Any]:
    """Negatives and settings of the loss, by name."""
    from sparring.losses import Symmetric
    from sparring.negatives import NearestItems, Sampled, Uniform, Union
    from sparring.training.sentence_transformers import in_batch

    return {
        "in batch": (in_batch, {}),
        "drawn": (
            lambda data: Union(in_batch(data), Sampled(Uniform(data.n_items), 4)),
            {"loss": Symmetric(), "chunk": 3},
        ),
        "mined": (lambda data: Union(in_batch(data), NearestItems(data.n_queries, 1, 3, every=1)), {"chunk": 8}),
    }


def all_trained(folder: str, out: Path, world: int) -> dict[str, list[list[float]]]:
    """The vectors of WORDS after six steps of each case, in batches of 16 over all ranks."""
    import datasets
    import sentence_transformers as library

    from sparring.training.sentence_transformers import NegativesLoss
    from sparring.training.text_trainer import Clustered, TextIds, refreshing

    dataset = datasets.Dataset.from_dict(rows_of(64))
    found = {}
    for name, (negatives, settings) in cases().items():
        model = library.SentenceTransformer(folder, device="cpu")
        loss = NegativesLoss(model, dataset, negatives, tau=0.1, **settings)
        more = {"batch_sampler": Clustered(loss, size=4, every=1)} if name == "mined" else {}
        place, size = out / f"{name}{world}", 16 // world
        with_lists, with_ids = [refreshing(loss)], TextIds(loss)
        trained(
            model, dataset, loss, place, with_lists, with_ids, max_steps=6, per_device_train_batch_size=size, **more
        )
        found[name] = model.encode(WORDS, normalize_embeddings=True).tolist()
    return found


if __name__ == "__main__":
    import datasets  # noqa: F401  # once, before the ranks part
    import sentence_transformers  # noqa: F401

    import sparring.training.text_trainer  # noqa: F401

    child = os.fork()
    rank = "1" if child == 0 else "0"
    os.environ |= {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    vectors = all_trained(sys.argv[1], Path(sys.argv[2]), 2)
    if child:
        (Path(sys.argv[2]) / "2.json").write_text(json.dumps(vectors))
        sys.exit(os.waitpid(child, 0)[1])
