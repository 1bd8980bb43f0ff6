"""Names that an argument accepts, for packages and for the command line, whose help must not wait for torch."""

from __future__ import annotations

SPLITS = ("auto", "file", "random", "temporal", "leave-last-out")
DIALECTS = ("standard", "trec", "rectools", "lenskit", "xir-release", "xc")
FUSIONS = ("scores", "ranks")
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio")
RANKINGS = {"towers": "knn", "classifiers": "clf", "fused": "fusion"}  # and the stage of each in result.json
INDEX_KINDS = ("exact", "hnsw", "cagra", "ivf", "ivfsq", "ivfpq")
STORES = {  # vector stores, and the forms of their addresses
    "milvus": "FILE.db or http://HOST:19530",
    "pgvector": "postgresql://USER@HOST/DATABASE",
    "qdrant": "FOLDER or http://HOST:6333",
    "lancedb": "FOLDER or s3://BUCKET/FOLDER",
    "opensearch": "http://HOST:9200",
    "elasticsearch": "http://HOST:9200",
}
FEEDS = ("opensearch", "elasticsearch", "vespa")  # stores whose own files can be written
MINED_LAYOUTS = ("triplet", "n-tuple", "n-tuple-scores", "labeled-pair", "labeled-list", "table")
