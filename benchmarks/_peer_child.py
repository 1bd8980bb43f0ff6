"""Train one model of another library in that library's own interpreter; started by peers.py.

    python _peer_child.py implicit-als PAIRS.npz OUT_FOLDER

Writes OUT_FOLDER/curve.json: for each point, the CPU seconds of training so far and the file of the two tables.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from _shared import Clock


class Curve:
    """Tables and the CPU seconds spent on them so far; saving is not counted."""

    def __init__(self, folder: Path, pairs_per_point: int) -> None:
        self.folder, self.pairs = folder, pairs_per_point
        self.points: list[dict[str, float | str]] = []
        self.clock = Clock()

    def add(self, users: np.ndarray, items: np.ndarray) -> None:
        cpu, wall = self.clock.read()
        path = self.folder / f"tables_{len(self.points)}.npz"

        def save() -> None:
            np.savez(path, users=np.asarray(users, np.float32), items=np.asarray(items, np.float32))

        self.clock.leave_out(save)
        self.points.append({"cpu": cpu, "wall": wall, "tables": path.name})

    def write(self, version: str) -> None:
        (self.folder / "curve.json").write_text(
            json.dumps({"version": version, "pairs_per_point": self.pairs, "points": self.points})
        )


def implicit_als(pairs: dict[str, np.ndarray], folder: Path) -> None:
    import implicit
    from implicit.cpu.als import AlternatingLeastSquares

    model = AlternatingLeastSquares(
        factors=64, alpha=40.0, regularization=10.0, iterations=15, num_threads=1, random_state=1
    )
    matrix = _matrix(pairs)
    curve = Curve(folder, len(pairs["users"]))
    model.fit(matrix, show_progress=False, callback=lambda *_: curve.add(model.user_factors, model.item_factors))
    curve.write(implicit.__version__)


def implicit_bpr(pairs: dict[str, np.ndarray], folder: Path, epochs: int = 20) -> None:
    import implicit
    from implicit.cpu.bpr import BayesianPersonalizedRanking

    model = BayesianPersonalizedRanking(
        factors=64, learning_rate=0.05, regularization=0.001, iterations=epochs, num_threads=1, random_state=1
    )
    matrix = _matrix(pairs)
    curve = Curve(folder, len(pairs["users"]) * epochs)
    model.fit(matrix, show_progress=False)
    curve.add(model.user_factors, model.item_factors)  # the factors carry the item bias as a last column
    curve.write(implicit.__version__)


def recbole_bpr(pairs: dict[str, np.ndarray], folder: Path) -> None:
    # removed in numpy 2; RecBole 1.2.1 and the ray release it pins still use them
    for name, kind in {"bool8": np.bool_, "float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
        if not hasattr(np, name):
            setattr(np, name, kind)
    import recbole
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.general_recommender import BPR
    from recbole.trainer import Trainer
    from recbole.utils import init_seed

    with tempfile.TemporaryDirectory() as data:
        (Path(data) / "pairs").mkdir()
        for part, users, items in [
            ("train", pairs["users"], pairs["items"]),
            ("valid", pairs["test_users"][:1000], pairs["test_items"][:1000]),
            ("test", pairs["test_users"], pairs["test_items"]),
        ]:
            head = "user_id:token\titem_id:token"
            np.savetxt(
                Path(data) / "pairs" / f"pairs.{part}.inter",
                np.stack([users, items], 1),
                "%d",
                "\t",
                header=head,
                comments="",
            )
        settings = {
            "data_path": data,
            "benchmark_filename": ["train", "valid", "test"],
            "load_col": {"inter": ["user_id", "item_id"]},
            "embedding_size": 64,
            "train_batch_size": 2048,
            "learning_rate": 0.001,
            "epochs": 1,
            "use_gpu": False,
            "show_progress": False,
            "checkpoint_dir": data,
            "train_neg_sample_args": {"distribution": "uniform", "sample_num": 1, "dynamic": False, "candidate_num": 0},
        }
        config = Config(model="BPR", dataset="pairs", config_dict=settings)
        init_seed(1, True)
        dataset = create_dataset(config)
        train, _, _ = data_preparation(config, dataset)
        model = BPR(config, train.dataset)
        trainer = Trainer(config, model)
        curve = Curve(folder, len(pairs["users"]))
        trainer.fit(train, None, saved=False, show_progress=False)
        users = dataset.token2id("user_id", [str(u) for u in range(int(pairs["n_users"]))])
        items = dataset.token2id("item_id", [str(i) for i in range(int(pairs["n_items"]))])
        tables = model.user_embedding.weight.detach().numpy(), model.item_embedding.weight.detach().numpy()
        curve.add(tables[0][users], tables[1][items])
        curve.write(recbole.__version__)


def _matrix(pairs: dict[str, np.ndarray]) -> Any:
    from scipy.sparse import csr_matrix

    ones = np.ones(len(pairs["users"]), np.float32)
    return csr_matrix((ones, (pairs["users"], pairs["items"])), shape=(int(pairs["n_users"]), int(pairs["n_items"])))


if __name__ == "__main__":
    what, source, target = sys.argv[1:]
    with np.load(source) as stored:
        arrays = {name: stored[name] for name in stored.files}
    {"implicit-als": implicit_als, "implicit-bpr": implicit_bpr, "recbole-bpr": recbole_bpr}[what](arrays, Path(target))
