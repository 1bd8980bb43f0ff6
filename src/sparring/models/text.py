"""Text towers: ids of queries or items to vectors of their texts, by a bag of token vectors or by a transformer.

A TextTower is an encoder and the tokens of its texts. Two towers may share one encoder (the usual siamese setting) or
have one each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.part import innermost
from sparring.data.texts.encoder import Dense, Pooling, group_sizes, pooled
from sparring.data.texts.texts import Texts, as_series, tokenize
from sparring.data.texts.tokenizers import Tokenizer
from sparring.models.towers import IdTower

_TOKENS = {"cpu": 2048, "cuda": 1 << 17}  # tokens that a transformer reads at once, padding included
_WASTE = 2.0  # padded tokens per real token above which grouping texts by length is cheaper on a GPU than padding


class TextTower(nn.Module):
    """Vectors of n texts by index: an encoder and the tokens of the texts.

    Each distinct id is encoded once per call. The tokens are not part of the state; `encode_texts` encodes new texts,
    each with the tower's `prompt` before it, as the tokens must have been made.
    Two towers over one encoder share its weights. When a transformer trains on a GPU, all ids are read at once, padded
    to one length and with repetitions, so that no step waits for the device and CUDA graphs can capture it.

        encoder = BagEncoder(tokenizer, vectors)
        Retriever(TextTower(encoder, query_texts), TextTower(encoder, item_texts))
    """

    def __init__(
        self, encoder: BagEncoder | TransformerEncoder, texts: Texts, max_len: int = 32, prompt: str = ""
    ) -> None:
        super().__init__()
        if not 1 <= max_len <= encoder.longest:
            raise ValueError(f"max_len {max_len} must be between 1 and the encoder's limit of {encoder.longest} tokens")
        self.encoder, self.texts, self.max_len, self.prompt = encoder, texts, max_len, prompt
        self.n, self.dim = len(texts), encoder.dim

    def forward(self, ids: Tensor) -> Tensor:
        encoder = self.encoder
        if isinstance(encoder, TransformerEncoder) and 0 < ids.numel() <= self.n and must_not_sync(ids):
            length = encoder.one_length(self.texts, self.max_len)
            if length is not None:
                ordered, which = _sorted(ids)
                return F.embedding(which, encoder.read_at(self.texts, ordered, self.max_len, length))
        distinct, which = torch.unique(ids, return_inverse=True)
        return F.embedding(which, encoder(self.texts, distinct, self.max_len))

    @torch.no_grad()
    def encode_texts(self, strings: Sequence[str]) -> Tensor:
        """Vectors (n, D) of any texts, in the tower's current mode (training or evaluation)."""
        device = next(self.parameters()).device
        texts = tokenize(prompted(strings, self.prompt), self.encoder.tokenizer, self.max_len)
        vectors: Tensor = self.encoder(texts, torch.arange(len(texts), device=device), self.max_len)
        return vectors

    def extra_repr(self) -> str:
        return f"{self.n:,} texts of at most {self.max_len} tokens"


def prompted(strings: Sequence[str] | pl.Series, prompt: str) -> Sequence[str] | pl.Series:
    """The texts with a prompt before each."""
    return prompt + as_series(strings) if prompt else strings


def must_not_sync(ids: Tensor) -> bool:
    """Whether ids belong to a training step on a GPU, which a CUDA graph captures if it never waits."""
    return ids.is_cuda and torch.is_grad_enabled()


def _sorted(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids in order (n,), and for each of `ids`, in its shape, the first position there that holds it."""
    ordered, order = ids.flatten().sort()
    place = torch.arange(len(ordered), device=ids.device)
    repeated = F.pad(ordered[1:] == ordered[:-1], (1, 0))
    first = place.masked_fill(repeated, 0).cummax(0).values
    return ordered, torch.empty_like(place).scatter_(0, order, first).view(ids.shape)


def text_tower(module: nn.Module) -> TextTower | None:
    """The text tower that a tower is or corrects (item_corrections.py), if any."""
    module = innermost(module)
    return module if isinstance(module, TextTower) else None


class BagEncoder(nn.Module):
    """A text as the mean of the vectors of its tokens, each with a learned weight.

        x = 1 / n  sum_t a_t e_t,   a_t = 1 at the start

    It ignores order and has no attention, so it trains on a CPU in minutes. A text without tokens is the zero vector.
    With `sparse` the gradient holds only the tokens of the batch, each once, for row optimisers (RowAdam): with
    32,000 x 256 vectors and 2 x 1,024 texts a step takes 55 ms on one CPU core, against 88 with a dense gradient.

        BagEncoder(WordTokenizer(), torch.randn(2**17, 64))

    Iyyer et al., Deep Unordered Composition Rivals Syntactic Methods, ACL 2015 (without its layers).
    """

    longest = 2**31 - 1

    def __init__(
        self, tokenizer: Tokenizer, vectors: Tensor, sparse: bool = True, tokenizer_file: Path | None = None
    ) -> None:
        super().__init__()
        self.tokenizer, self.tokenizer_file = tokenizer, tokenizer_file
        self.vectors = IdTower(len(vectors), vectors.shape[1], sparse=sparse)
        self.weights = IdTower(len(vectors), 1, sparse=sparse)
        self.dim = vectors.shape[1]
        with torch.no_grad():
            self.vectors.weight.copy_(vectors)
            self.weights.weight.fill_(1.0)

    def forward(self, texts: Texts, ids: Tensor, max_len: int) -> Tensor:
        """Vectors (n, D) of these texts."""
        tokens, begin = texts.flat(ids, max_len)
        distinct, which = torch.unique(tokens, return_inverse=True)
        if not len(distinct):
            return self.vectors.weight.new_zeros(len(ids), self.dim)
        weighed = self.vectors(distinct) * self.weights(distinct)
        return F.embedding_bag(which, weighed, begin, mode="mean")


class TransformerEncoder(nn.Module):
    """A text as the mean of a transformer's last layer over its tokens, or the vector of its first (cls) or last token.

    `model` is any Hugging Face encoder, `tokenizer` its own, `head` the layers after the pooling, if any. Texts of
    similar length are read together to limit padding. The model's dropout is active in training mode. Under autocast
    the layers run in bfloat16, the pooling in
    float32.

        TransformerEncoder(AutoModel.from_pretrained(folder), find_tokenizer(folder), pooling="mean")

    Reimers and Gurevych, Sentence-BERT, EMNLP 2019, section 3.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        pooling: Pooling = "mean",
        longest: int = 512,
        tokenizer_file: Path | None = None,
        head: nn.Sequential | None = None,
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "cls", "last"):
            raise ValueError(f"unknown pooling {pooling!r} of a text tower: use 'mean', 'cls' or 'last'")
        self.model, self.tokenizer, self.tokenizer_file = model.train(), tokenizer, tokenizer_file
        self.pooling, self.longest = pooling, longest
        # These take a full attention mask. From a mask per token they would ask the device whether anything is padded.
        version = getattr(sys.modules.get("transformers"), "__version__", "0")
        self.full_mask = (
            int(version.split(".")[0]) >= 5 and getattr(model.config, "_attn_implementation", None) == "sdpa"
        )
        self.head = nn.Sequential() if head is None else head
        dense = [layer for layer in self.head if isinstance(layer, Dense)]
        self.dim = dense[-1].linear.out_features if dense else int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def forward(self, texts: Texts, ids: Tensor, max_len: int) -> Tensor:
        """Vectors (n, D) of these texts, float32."""
        if not len(ids):
            return torch.zeros(0, self.dim, device=ids.device)
        start, index = torch.from_numpy(texts.start), ids.cpu()
        length, order = (start[index + 1] - start[index]).clamp(max=max_len).sort(descending=True, stable=True)
        groups = ids[order.to(ids.device)].split(group_sizes(length.tolist(), _TOKENS.get(ids.device.type, 2048)))
        vectors = torch.cat([self._read(*texts.padded(group, max_len)) for group in groups])
        return vectors[order.argsort().to(ids.device)]

    def one_length(self, texts: Texts, max_len: int) -> int | None:
        """A length that fits all texts, known without looking at a batch; None if most of it would be padding."""
        longest, mean = texts.longest_and_mean(max_len)
        length = min(-(-max(longest, 1) // 8) * 8, self.longest)
        return length if length <= _WASTE * mean else None

    def read_at(self, texts: Texts, ids: Tensor, max_len: int, length: int) -> Tensor:
        """Vectors (n, D) of texts padded to one length and read at once: no shape depends on a value."""
        return self._read(*texts.padded(ids, max_len, length), full_mask=self.full_mask)

    def _read(self, tokens: Tensor, mask: Tensor, full_mask: bool = False) -> Tensor:
        mask[:, 0] = True  # a text without tokens has nothing to attend to
        attends = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1) if full_mask else mask.long()
        hidden = self.model(input_ids=tokens, attention_mask=attends).last_hidden_state
        vectors: Tensor = self.head(pooled(hidden, mask, self.pooling))
        return vectors
