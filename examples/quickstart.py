"""Train two kinds of negatives on a synthetic set, measure both, and recommend. Takes a few seconds on a CPU."""

import sparring
from sparring.data import make_world
from sparring.negatives import InBatch, Sampled, Uniform, Union

data = make_world(queries=400, items=200, seed=0).interactions  # or sparring.read("interactions.parquet")
split = sparring.split(data, "random", valid=0.1, test=0.2, seed=0)
train = split.train
setup = sparring.Setup.of(dim=16, batch_size=256, epochs=15, lr=0.02)
popularity = sparring.recipes.item_frequency(train)

choices = {
    "in-batch": InBatch(popularity),
    "in-batch and uniform": Union(InBatch(popularity), Sampled(Uniform(train.n_items), 64)),
}
for name, negatives in choices.items():
    run = sparring.compose(train, setup, sparring.Term(1.0, negatives))
    fitted = sparring.fit(run, split, out=f"runs/{name.replace(' ', '-')}", device="cpu", overwrite=True)
    print(f"{name}: recall@20 {fitted.test.metrics['recall@20']:.4f}, ndcg@20 {fitted.test.metrics['ndcg@20']:.4f}")

query = int(data.query_ids.ids[0])
print(sparring.load("runs/in-batch-and-uniform").recommend([query], k=5))
