"""Names that an argument accepts, for packages and for the command line, whose help must not wait for torch."""

from __future__ import annotations

SPLITS = ("auto", "file", "random", "temporal", "leave-last-out")
DIALECTS = ("standard", "trec", "rectools", "lenskit", "xir-release", "xc")
FUSIONS = ("scores", "ranks")
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio")
INDEX_KINDS = ("exact", "hnsw", "ivf", "ivfsq", "ivfpq")
