"""Names that an argument accepts, for packages and for the command line, whose help must not wait for torch."""

from __future__ import annotations

SPLITS = ("auto", "file", "random", "temporal", "leave-last-out")
DIALECTS = ("standard", "trec", "rectools", "lenskit", "xir-release", "xc")
FUSIONS = ("scores", "ranks")
INDEX_KINDS = ("exact", "hnsw", "ivf", "ivfsq", "ivfpq")
MINED_LAYOUTS = ("triplet", "n-tuple", "n-tuple-scores", "labeled-pair", "labeled-list", "table")
