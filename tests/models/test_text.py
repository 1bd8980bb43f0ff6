"""Text towers equal one text at a time, gradients equal the full batch, and encoders load from their folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparring.core.errors import UserError
from sparring.data.texts.texts import Texts, tokenize
from sparring.data.texts.tokenizers import WordTokenizer
from sparring.models import encoders
from sparring.models.encoders import encoder_width, load_encoder, open_encoder, save_encoder
from sparring.models.retriever import Retriever
from sparring.models.text import BagEncoder, TextTower, TransformerEncoder
from sparring.negatives import InBatch, Sampled, Uniform, Union
from sparring.recipes.run import Term, compose
from sparring.recipes.setup import Setup
from sparring.training.optimizers import optimizers
from sparring.training.step import training_step
from support.texts import text_parts, tiny_bert

STRINGS = ["red shoe", "", "old old lamp", "a chair, small and cold and warm and new", "red shoe", "hat"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_bert(tmp_path_factory.mktemp("bert"))


def a_bag(size: int = 50, dim: int = 6, sparse: bool = True) -> BagEncoder:
    torch.manual_seed(0)
    encoder = BagEncoder(WordTokenizer(size), torch.randn(size, dim), sparse)
    with torch.no_grad():
        encoder.weights.weight.uniform_(0.2, 2.0)
    return encoder


def one_by_one(encoder: BagEncoder, texts: Texts, at: int, max_len: int) -> Tensor:
    tokens = texts.tokens[texts.start[at] : texts.start[at + 1]][:max_len].tolist()
    found = [encoder.weights.weight[t] * encoder.vectors.weight[t] for t in tokens]
    return torch.stack(found).mean(0) if found else torch.zeros(encoder.dim)


@pytest.mark.parametrize("max_len", [1, 3, 32])
def test_a_bag_is_the_weighted_mean_of_its_tokens(max_len: int) -> None:
    """Ids of any shape, repeated ids, empty texts (zero) and truncated texts equal a loop over tokens."""
    encoder = a_bag()
    tower = TextTower(encoder, tokenize(STRINGS, encoder.tokenizer, 32), max_len)
    ids = torch.tensor([[3, 1, 0], [3, 5, 2]], dtype=torch.int32)
    want = torch.stack(
        [torch.stack([one_by_one(encoder, tower.texts, i, max_len) for i in row]) for row in ids.tolist()]
    )
    torch.testing.assert_close(tower(ids), want)
    assert tower(torch.tensor(4)).shape == (6,)
    assert torch.equal(tower(torch.tensor([1, 1])), torch.zeros(2, 6))
    assert len(tower.texts) == tower.n == 6


@pytest.mark.parametrize("sparse", [True, False])
def test_the_gradient_of_a_bag_is_that_of_the_loop(sparse: bool) -> None:
    """Gradients of vectors and weights equal the loop's; a sparse one has every token of the batch once."""
    encoder = a_bag(sparse=sparse)
    tower = TextTower(encoder, tokenize(STRINGS, encoder.tokenizer, 32), 32)
    ids, scale = torch.tensor([0, 2, 3, 0, 1]), torch.randn(5, 6)
    (tower(ids) * scale).sum().backward()
    found = [table.weight.grad for table in (encoder.vectors, encoder.weights)]
    encoder.zero_grad()
    sum(
        (one_by_one(encoder, tower.texts, i, 32) * s).sum() for i, s in zip(ids.tolist(), scale, strict=True)
    ).backward()  # type: ignore[union-attr]
    for gradient, table in zip(found, (encoder.vectors, encoder.weights), strict=True):
        assert gradient is not None
        assert table.weight.grad is not None
        assert gradient.is_sparse is sparse
        torch.testing.assert_close(gradient.to_dense(), table.weight.grad)
        if sparse:
            rows = gradient._indices()[0]
            assert len(rows) == len(rows.unique())


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_transformer_reads_each_text_as_if_alone(bert: Path, pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding and grouping change nothing: a text has the vector that transformers computes for it alone."""
    import transformers

    from sparring.models import text

    monkeypatch.setitem(text._TOKENS, "cpu", 12)  # several groups
    encoder = load_encoder(bert, pooling).eval()  # type: ignore[arg-type]
    tower = TextTower(encoder, tokenize(STRINGS, encoder.tokenizer, 8), 8)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    model = transformers.AutoModel.from_pretrained(bert).eval()
    found = tower(torch.tensor([5, 3, 3, 1, 0, 2]))
    for vector, at in zip(found, [5, 3, 3, 1, 0, 2], strict=True):
        hidden = model(**tokenizer(STRINGS[at], return_tensors="pt", truncation=True, max_length=8)).last_hidden_state[
            0
        ]
        torch.testing.assert_close(vector, hidden[0] if pooling == "cls" else hidden.mean(0), rtol=1e-4, atol=1e-5)


class Waits(TorchDispatchMode):
    """Records operations that would wait for a GPU: reading a value, or a shape that depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        masks = name.strip("_").startswith("index") and any(
            getattr(each, "dtype", None) == torch.bool for each in args[1] or ()
        )
        if masks or name in ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "repeat_interleave"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_len", [3, 8])
def test_a_training_step_on_a_gpu_waits_for_nothing(bert: Path, max_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors and gradients equal those of grouped texts, also empty and truncated, without reading a value."""
    from sparring.models import text

    monkeypatch.setattr(text, "_WASTE", 9.0)  # texts of 3 tokens in places of 8
    encoder = load_encoder(tiny_bert(bert.parent / "undropped", dropout=0.0))
    tower = TextTower(encoder, tokenize(STRINGS, encoder.tokenizer, 32), max_len)
    ids, scale = torch.tensor([[5, 3, 3], [1, 0, 2]], dtype=torch.int32), torch.randn(2, 3, 16)
    found = []
    for at_once in (False, True):
        monkeypatch.setattr(text, "must_not_sync", lambda ids, answer=at_once: answer)
        encoder.zero_grad()
        with Waits() as waits:
            vectors = tower(ids)
            (vectors * scale).sum().backward()
        assert bool(waits.found) is not at_once
        found.append((vectors.detach(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_a_text_that_occurs_twice_has_one_vector(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, a repeated text has one vector, as if each text were encoded once."""
    from sparring.models import text

    monkeypatch.setattr(text, "must_not_sync", lambda ids: True)
    encoder = load_encoder(bert)
    tower = TextTower(encoder, tokenize(STRINGS, encoder.tokenizer, 8), 8)
    first, second, other, third = tower(torch.tensor([2, 2, 3, 2]))
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert not torch.equal(first, other)
    assert tower(torch.zeros(0, dtype=torch.long)).shape == (0, 16)
    assert len(tower(torch.arange(7) % 6)) == 7  # more ids than texts: each text is read once


def test_mostly_padding_is_not_read_at_once(bert: Path) -> None:
    """The common length is the longest text's, rounded up to eights, within the limit; None if mostly padding."""
    encoder = load_encoder(bert)
    assert isinstance(encoder, TransformerEncoder)

    def length(words: list[int], max_len: int = 40) -> int | None:
        return encoder.one_length(tokenize([" ".join(["red"] * n) for n in words], encoder.tokenizer, 40), max_len)

    assert length([5, 7]) == 16  # plus one token at each end
    assert length([30, 36]) == 40
    assert length([30, 36], 20) == 24
    assert length([1, 1, 1, 30]) is None
    assert length([]) is None


def test_dropout_is_on_in_training_only(bert: Path) -> None:
    """A new tower is in training mode; item_vectors and encode_texts have no dropout and leave the mode unchanged."""
    encoder = load_encoder(bert)
    texts = tokenize(STRINGS, encoder.tokenizer, 8)
    model = Retriever(TextTower(encoder, texts, 8), TextTower(encoder, texts, 8))
    assert not torch.equal(model.encode_items(torch.arange(6)), model.encode_items(torch.arange(6)))
    assert torch.equal(model.item_vectors(), model.item_vectors())
    torch.testing.assert_close(model.encode_texts(STRINGS), model.query_vectors(torch.arange(6)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        model.encode_texts(["Red SHOE"], "item")[0], model.item_vectors()[0], rtol=1e-4, atol=1e-5
    )
    assert encoder.training


@pytest.mark.parametrize("share", [True, False])
def test_weights_are_shared_or_not(bert: Path, share: bool) -> None:
    """Shared weights give a text one vector on both sides; separate ones leave the other side untrained."""
    setup = Setup.of(query_tower="text", item_tower="text", encoder=str(bert), share_encoder=share)
    run = compose(text_parts().train, setup, Term(1.0, InBatch()))
    names = [name for name, _ in run.model.named_parameters()]
    assert any(name.startswith("item.") for name in names) is not share
    run.model.encode_queries(torch.tensor([0])).sum().backward()
    item = run.model.item.encoder.model.embeddings.word_embeddings.weight  # type: ignore[union-attr]
    assert (item.grad is not None) is share


@pytest.mark.parametrize("encoder", ["bag", "bert"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_gradient_cache_works_with_texts(bert: Path, encoder: str, chunk: int) -> None:
    """Losses and gradients of a batch encoded in chunks equal those of a batch encoded at once."""
    parts = text_parts()
    negatives = Union(InBatch(), Sampled(Uniform(40), 9))
    found = []
    for size in (None, chunk):
        # without dropout: its draws depend on the chunks
        name = "bag" if encoder == "bag" else str(tiny_bert(bert.parent / "still", dropout=0.0))
        setup = Setup.of(query_tower="text", item_tower="text", encoder=name, dim=8, chunk=size)
        run = compose(parts.train, setup, Term(1.0, negatives))
        queries, items = (column[:20].long() for column in parts.train.pairs())
        losses, _, _ = training_step(run, queries, items, torch.Generator().manual_seed(3))
        (losses * torch.linspace(0.5, 2, 20)).mean().backward()
        found.append(
            (losses.detach(), {n: p.grad.to_dense() for n, p in run.model.named_parameters() if p.grad is not None})
        )
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    assert found[0][1].keys() == found[1][1].keys() != set()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-3, atol=1e-5)


def test_only_matrices_of_a_transformer_decay(bert: Path) -> None:
    """Biases and layer norms are in a group without decay, all other weights in one with decay."""
    encoder = load_encoder(bert)
    (rule,) = optimizers(encoder, "row-adam", lr=1e-3, weight_decay=0.1)
    decays = {id(p): group["weight_decay"] for group in rule.param_groups for p in group["params"]}
    for name, parameter in encoder.named_parameters():
        assert decays[id(parameter)] == (0.0 if name.endswith("bias") or "LayerNorm" in name else 0.1), name


def test_an_encoder_is_read_back(bert: Path, tmp_path: Path) -> None:
    """Saved and loaded, bags and transformers give the same vectors, and transformers reads the folder too."""
    import transformers

    for at, encoder in enumerate((a_bag(), load_encoder(bert).eval())):
        save_encoder(encoder, tmp_path / str(at))
        again = load_encoder(tmp_path / str(at)).eval()
        first, second = (TextTower(e, tokenize(STRINGS, e.tokenizer, 8), 8)(torch.arange(6)) for e in (encoder, again))
        assert torch.equal(first, second)
        assert encoder_width(str(tmp_path / str(at)), 3) == encoder.dim
    assert transformers.AutoModel.from_pretrained(tmp_path / "1").config.hidden_size == 16
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "1")("red")["input_ids"] == [2, 4, 3]


def test_a_folder_used_again_holds_one_encoder(bert: Path, tmp_path: Path) -> None:
    """Saving replaces the tokenizer and the weights of an earlier encoder in the folder."""
    save_encoder(load_encoder(bert), tmp_path)
    save_encoder(a_bag(), tmp_path, weights=False)
    assert not (tmp_path / "model.safetensors").exists()
    assert isinstance(load_encoder(tmp_path, weights=False).tokenizer, WordTokenizer)


def test_a_bag_without_wordllama_starts_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bag` always works; `wordllama` names its missing package; both have `dim` dimensions."""
    monkeypatch.setattr(encoders, "package_folder", lambda name: None)
    encoder = open_encoder("bag", dim=5, init_std=0.5)
    assert encoder.dim == encoder_width("bag", 5) == 5
    assert isinstance(encoder, BagEncoder)
    assert encoder.vectors.weight.std().item() == pytest.approx(0.5, rel=0.05)
    with pytest.raises(UserError, match="pip install wordllama"):
        open_encoder("wordllama", dim=5)


def test_wordllama_gives_its_first_dimensions() -> None:
    """The package's vectors are cut to `dim` and scaled to init_std; too many dimensions are an error."""
    pytest.importorskip("tokenizers")
    if encoders.package_folder("wordllama") is None:
        pytest.skip("wordllama is not installed")
    import safetensors.torch

    encoder = open_encoder("wordllama", dim=7)
    folder = encoders.package_folder("wordllama")
    assert folder is not None
    whole = safetensors.torch.load_file(next(folder.rglob("*_256.safetensors")))["embedding.weight"]
    assert isinstance(encoder, BagEncoder)
    scale = 0.1 / whole.float().std()
    torch.testing.assert_close(encoder.vectors.weight.detach(), whole[:, :7].float() * scale)
    tokens, _ = tokenize(["dog"], encoder.tokenizer, 8).flat(torch.tensor([0]), 8)
    assert 1 not in tokens.tolist()  # the token that would start every text
    with pytest.raises(UserError, match=r"dim=300 .* 256"):
        open_encoder("bag", dim=300)


def test_what_cannot_be_read_is_named(bert: Path, tmp_path: Path) -> None:
    """A length beyond the encoder's, an empty folder and a tower without an encoder raise errors."""
    encoder = load_encoder(bert)
    with pytest.raises(ValueError, match=r"max_len 41 .* 40 tokens"):
        TextTower(encoder, tokenize(STRINGS, encoder.tokenizer, 8), 41)
    with pytest.raises(UserError, match=r"no text encoder.*config\.json"):
        load_encoder(tmp_path)
    with pytest.raises(UserError, match="a text tower needs an encoder"):
        compose(text_parts().train, Setup.of(query_tower="text"), Term(1.0, InBatch()))


def test_weights_kept_in_halves_train_in_full(bert: Path, tmp_path: Path) -> None:
    """float16 and bfloat16 weights are loaded as float32, where a small step is not lost to rounding."""
    import shutil

    from safetensors.torch import load_file, save_file

    for kind in (torch.float16, torch.bfloat16):
        folder = tmp_path / str(kind).split(".")[1]
        shutil.copytree(bert, folder)
        halves = {name: tensor.to(kind) for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
        encoder = load_encoder(folder)
        assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
        found = dict(encoder.model.named_parameters())  # type: ignore[union-attr]
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in halves.items() if name in found)
