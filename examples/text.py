"""Train a text retriever on a dozen sentences and ask it in new words, with a bag of hashed words as encoder."""

import polars as pl

import sparring

TOPICS = {
    "orchard": ["apple", "pear", "plum", "cherry", "peach"],
    "workshop": ["hammer", "saw", "chisel", "drill", "plane"],
    "harbour": ["anchor", "sail", "mast", "rudder", "keel"],
}
pairs = pl.DataFrame(
    [
        (f"looking for a {word} from the {topic}", f"{other} {topic}")
        for topic, words in TOPICS.items()
        for word in words
        for other in words
        if other != word
    ],
    schema=["question", "product"],
    orient="row",
)
data = sparring.read(pairs, query="question", item="product")
split = sparring.split(data, "random", valid=0, test=0.2, seed=0)
settings = {"encoder": "bag", "query_text": "id", "item_text": "id", "dim": 32, "epochs": 20, "batch_size": 16, "n": 8}
run = sparring.build("debiased_mns", split.train, settings)
fitted = sparring.fit(run, split, "runs/text", device="cpu", k=(1, 3), overwrite=True)
print(f"recall@3 on held-out pairs: {fitted.test.metrics['recall@3']:.4f}")
print(sparring.load("runs/text").recommend_text(["something with a mast for the harbour"], k=3))
