"""Blocks of causal sequence models: SASRec, LiGR (eSASRec) and HSTU, behind one interface.

    block(x, allowed, position, time) -> (B, L, D)

    x          (B, L, D)   vectors of the places of a row
    allowed    (B, L, L)   bool: place i may read place j, so j is in the same sequence and not after i
    position   (B, L)      int64: where a place is in its sequence
    time       (B, L)      int64 seconds, or None if the data have no times

A row may hold several sequences side by side: `allowed` separates them, and distances come from `position`, never from
the column. A place of padding may read nothing; its result is finite and means nothing. No shape depends on a value, so
CUDA graphs can capture every block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.errors import UserError

_BUCKETS = 128  # of time differences, as in HSTU's release
_LOG_BUCKET = 0.301  # width of a bucket in natural logarithms of seconds, as in HSTU's release


class SasRecBlock(nn.Module):
    """A block of SASRec: causal self-attention, then a point-wise network of two layers.

        x <- x + dropout(attention(norm(x)))                  attention = softmax(Q K^T / sqrt(D / heads)) V
        x <- x + dropout(W_2 relu(W_1 norm(x) + b_1) + b_2)

    The paper's form: both sublayers see normalised inputs, residuals carry unnormalised ones, Q, K and V are linear
    maps without bias, and heads are concatenated without a further map. The authors' code differs: it normalises
    queries but not keys and values, carries the normalised inputs on, and drops attention weights too.

    Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018, section III.
    """

    def __init__(self, dim: int, heads: int = 1, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = checked_heads(dim, heads)
        self.attention_norm, self.forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.inner, self.outer = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, allowed: Tensor, position: Tensor, time: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, -1)
        x = x + self.dropout(attention(q, k, v, allowed, self.heads))
        hidden: Tensor = self.outer(F.relu(self.inner(self.forward_norm(x))))
        return x + self.dropout(hidden)


class LigrBlock(nn.Module):
    """A block of eSASRec, LiGR's layer: attention and a SwiGLU network, each behind a learned gate.

        x <- x + sigmoid(G_1 x) * dropout(W_o attention(norm(x)))
        x <- x + sigmoid(G_2 x) * dropout(W_3 (silu(W_1 z) * W_2 z)),   z = norm(x)

    The gate reads the input before its normalisation. W_1 and W_2 have `multiplier` times D rows; the three have no
    bias, all other maps have one. Dropout also applies to attention weights and inside the network, as in the code of
    eSASRec's authors.

    Tikhonovich et al., eSASRec: Enhancing Transformer-based Recommendations in a Modular Fashion, RecSys 2025. Borisyuk
    et al., From Features to Transformers: Redefining Ranking for Scalable Impact, 2025.
    """

    def __init__(self, dim: int, heads: int = 1, dropout: float = 0.1, multiplier: int = 4) -> None:
        super().__init__()
        if multiplier < 1:
            raise UserError(f"the multiplier of a LiGR block must be at least 1, got {multiplier}")
        self.heads = checked_heads(dim, heads)
        self.attention_norm, self.forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attention_gate, self.forward_gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.inner = nn.Linear(dim, 2 * multiplier * dim, bias=False)  # W_1 and W_2
        self.outer = nn.Linear(multiplier * dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, allowed: Tensor, position: Tensor, time: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, -1)
        dropped = self.dropout.p if self.training else 0.0
        read = self.out(attention(q, k, v, allowed, self.heads, dropped))
        x = x + torch.sigmoid(self.attention_gate(x)) * self.dropout(read)
        switch, hidden = self.inner(self.forward_norm(x)).chunk(2, -1)
        hidden = self.outer(self.dropout(F.silu(switch) * hidden))
        return x + torch.sigmoid(self.forward_gate(x)) * self.dropout(hidden)


class HstuBlock(nn.Module):
    """A block of HSTU: attention without softmax, with biases for distance in places and in time, and a gate.

        U, V, Q, K = split(silu(W norm(x)))
        a_ij = silu(q_i . k_j + p[position_i - position_j] + t[bucket(time_i - time_j)]) / length    per head
        x <- x + W_2 dropout(norm(A V) * U) + b_2
        bucket(s) = floor(log(max(|s|, 1)) / 0.301), at most 128

    `length` is the longest window: it divides, so that padding changes nothing, and distances of `length` and more
    share a bias. The biases are the same for all heads, the norms have no parameters, and W starts from N(0, 0.02^2),
    as in the release. The release subtracts time_j from the time of the item to predict, which a request would have to
    know; here from the time of place i. Only a `timed` block has time biases; it leaves them out where times are not
    given.

    Zhai et al., Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
    Recommendations, ICML 2024, section 3.
    """

    def __init__(self, dim: int, heads: int = 1, dropout: float = 0.1, length: int = 200, timed: bool = False) -> None:
        super().__init__()
        self.dim, self.heads, self.length = dim, checked_heads(dim, heads), length
        self.uvqk, self.outer = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.by_position = nn.Parameter(torch.empty(length).normal_(0.0, 0.02))
        self.by_time = nn.Parameter(torch.empty(_BUCKETS + 1).normal_(0.0, 0.02)) if timed else None
        nn.init.normal_(self.uvqk.weight, std=0.02)
        nn.init.xavier_uniform_(self.outer.weight)

    def forward(self, x: Tensor, allowed: Tensor, position: Tensor, time: Tensor | None = None) -> Tensor:
        u, v, q, k = F.silu(self.uvqk(self._norm(x))).chunk(4, -1)
        bias = _biases(self.by_position, _differences(position).clamp(0, self.length - 1))
        if self.by_time is not None and time is not None:
            bias = bias + _biases(self.by_time, time_buckets(_differences(time)))
        scores = split_heads(q, self.heads) @ split_heads(k, self.heads).mT + bias.unsqueeze(1)
        weights = (F.silu(scores) / self.length).masked_fill(~allowed.unsqueeze(1), 0.0)
        read = (weights @ split_heads(v, self.heads)).transpose(1, 2).flatten(2)
        changed: Tensor = self.outer(self.dropout(self._norm(read) * u))
        return x + changed

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), eps=1e-6)


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, heads: int, dropout: float = 0.0) -> Tensor:
    """Softmax attention (B, L, D) of places over the places they may read; 0 for a place that may read nothing."""
    q, k, v = (split_heads(part, heads) for part in (q, k, v))
    read = F.scaled_dot_product_attention(q, k, v, allowed.unsqueeze(1), dropout)
    return read.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, D) to (B, heads, L, D / heads)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def time_buckets(seconds: Tensor) -> Tensor:
    """The bucket of a time difference: floor(log(max(|s|, 1)) / 0.301), at most 128."""
    return (seconds.abs().clamp(min=1).log() / _LOG_BUCKET).long().clamp(max=_BUCKETS)


def checked_heads(dim: int, heads: int) -> int:
    """`heads`, if that many of equal width make `dim`."""
    if heads < 1 or dim % heads:
        raise UserError(f"{heads} heads do not divide {dim} dimensions: choose a number that does")
    return heads


def _biases(table: Tensor, index: Tensor) -> Tensor:
    """table[index], (B, L, L). The gradient is first summed place by place: an embedding's would sort B L L indices."""
    return table.expand(*index.shape[:2], -1).gather(-1, index)


def _differences(x: Tensor) -> Tensor:
    """x_i - x_j, (B, L) to (B, L, L)."""
    return x.unsqueeze(2) - x.unsqueeze(1)
