"""Token embedding and output head, the vocabulary split over tensor-parallel ranks.

Shapes: T tokens, E hidden size, V this rank's share of the vocabulary (rounded up so that ranks share it equally).
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stenograph.layers.linear import Build, Weight, check_shape, dense
from stenograph.layers.prepacked import PrepackedLinear, can_prepack
from stenograph.layers.quantized import PackedLinear, QuantizedTensor, pack

log = logging.getLogger(__name__)


class VocabShare:
    """Rows [start, stop) of the vocabulary belong to this rank; the last rank's may be fewer than `width`."""

    def __init__(self, build: Build, vocab_size: int) -> None:
        self.width = -(-vocab_size // build.tp.size)
        self.start = min(vocab_size, build.tp.rank * self.width)
        self.stop = min(vocab_size, self.start + self.width)

    def take(self, value: Weight) -> Weight:
        if isinstance(value, QuantizedTensor):
            return value if self.stop - self.start == value.shape[0] else value.rows(self.start, self.stop)
        return value[self.start : self.stop]


class VocabEmbedding(nn.Module):
    """id -> row of the table, times `scale` (Gemma multiplies by sqrt(hidden size), in the weights' dtype)."""

    weight: Tensor | None

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.build, self.vocab_size, self.hidden_size = build, vocab_size, hidden_size
        self.share = VocabShare(build, vocab_size)
        self.scale = None if scale == 1.0 else torch.tensor(scale, dtype=build.dtype, device=build.device)
        self.register_parameter("weight", None)
        self.source: Weight | None = None  # as loaded, for a tied head to pack; dropped by the head

    def load_weight(self, part: str, kind: str, value: Weight) -> bool:
        if part or kind != "weight":
            return False
        check_shape(value, (self.vocab_size, self.hidden_size))
        self.source = self.share.take(value)
        table = dense(self.source, self.build.dtype).to(self.build.device)
        self.weight = nn.Parameter(table, requires_grad=False)
        return True

    def allocate(self) -> None:
        rows = self.share.stop - self.share.start
        table = torch.empty(rows, self.hidden_size, device=self.build.device, dtype=self.build.dtype)
        self.weight = nn.Parameter(table, requires_grad=False)

    def missing(self) -> list[tuple[str, str]]:
        return [] if self.weight is not None else [("", "weight")]

    def forward(self, ids_T: Tensor) -> Tensor:
        assert self.weight is not None
        if self.build.tp.size == 1:
            x_TE = F.embedding(ids_T, self.weight)
        else:
            local_T = ids_T - self.share.start
            mine_T = (local_T >= 0) & (local_T < self.weight.shape[0])
            x_TE = F.embedding(local_T.where(mine_T, torch.zeros_like(local_T)), self.weight)
            x_TE = self.build.tp.all_reduce(x_TE * mine_T.unsqueeze(-1))
        return x_TE if self.scale is None else x_TE * self.scale


class LMHead(nn.Module):
    """Hidden states -> logits over the whole vocabulary, float32. Tied heads share the embedding's table."""

    weight: Tensor | None

    def __init__(self, build: Build, embedding: VocabEmbedding, *, tied: bool, softcap: float | None = None) -> None:
        super().__init__()
        self.build, self.tied, self.softcap = build, tied, softcap
        self.vocab_size, self.hidden_size = embedding.vocab_size, embedding.hidden_size
        self.share = embedding.share
        self.register_parameter("weight", None)
        self.packed: PackedLinear | PrepackedLinear | None = None
        self._own: Weight | None = None

    def load_weight(self, part: str, kind: str, value: Weight) -> bool:
        if part or kind != "weight":
            return False
        check_shape(value, (self.vocab_size, self.hidden_size))
        self._own = self.share.take(value)
        return True

    def finish(self, embedding: VocabEmbedding) -> None:
        """After loading: settles which table is used. A file's own head wins over a tie, and
        a warning says so if they differ."""
        source, embedding.source = embedding.source, None
        own, self._own = self._own, None
        if own is not None and self.tied and embedding.weight is not None:
            if torch.equal(dense(own, self.build.dtype).to(self.build.device), embedding.weight):
                own = None
            else:
                log.warning(
                    "The configuration ties lm_head to the embeddings, but the file holds another: using the file's."
                )
        chosen = source if own is None else own
        if isinstance(chosen, QuantizedTensor) and self.build.device.type == "cpu":
            self.packed = pack(chosen, self.build.dtype, keep_dense=self.build.dense_copies)
        if self.packed is None and self.weight is None:
            table = embedding.weight if own is None else dense(own, self.build.dtype).to(self.build.device)
            assert table is not None
            if can_prepack(self.build.dtype, self.build.device):
                self.packed = PrepackedLinear(table)
            else:
                self.weight = nn.Parameter(table, requires_grad=False)

    def allocate(self) -> None:
        if not self.tied:
            rows = self.share.stop - self.share.start
            table = torch.empty(rows, self.hidden_size, device=self.build.device, dtype=self.build.dtype)
            self.weight = nn.Parameter(table, requires_grad=False)

    def missing(self) -> list[tuple[str, str]]:
        return (
            []
            if self.tied or self.weight is not None or self.packed is not None or self._own is not None
            else [("", "weight")]
        )

    def forward(self, hidden_TE: Tensor) -> Tensor:
        if self.packed is not None:
            logits_TV = self.packed(hidden_TE)
        else:
            assert self.weight is not None
            logits_TV = F.linear(hidden_TE, self.weight)
        logits_TV = logits_TV.float()
        if self.build.tp.size > 1:
            short = self.share.width - logits_TV.shape[-1]
            logits_TV = self.build.tp.all_gather_last(F.pad(logits_TV, (0, short)) if short else logits_TV)
            logits_TV = logits_TV[:, : self.vocab_size]
        if self.softcap is not None:
            logits_TV = torch.tanh(logits_TV / self.softcap) * self.softcap
        return logits_TV
