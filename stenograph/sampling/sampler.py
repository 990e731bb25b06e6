"""Choosing the next token of every row, on the device that holds the logits.

A row's choice depends on its own logits, parameters, seed and position, on nothing else in the batch: one uniform
number a row comes from a counter-based hash of (seed, position), and the token is where the cumulative distribution
passes it.

Shapes: N rows, V vocabulary, K candidates kept of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stenograph.sampling.params import SamplingParams, TokenLogprob

CANDIDATES = 1024
"""Tokens looked at first for top-k and top-p; a row whose cut lies further out is sorted whole."""
MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What one row needs to choose its token at `position` (the number of tokens before it).

    `masked_token_ids` may not be chosen (end tokens, before min_tokens). The token lists are read for penalties alone.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    masked_token_ids: Sequence[int] = ()

    @property
    def edits_logits(self) -> bool:
        return self.params.has_penalties or bool(self.params.logit_bias) or bool(self.masked_token_ids)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), from splitmix64 (Steele, Lea and Flood, 2014) over the seed and the position; 24 bits, exact in float32."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & MASK_64
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        z = ((z ^ (z >> 30)) * multiplier) & MASK_64
    return float(((z ^ (z >> 31)) >> 40) * 2.0**-24)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one step. `drawn` are the indices of the rows that are not greedy."""

    rows: Sequence[SamplingRow]
    drawn: list[int]
    edited: list[int]
    logprobs: list[int]

    @classmethod
    def build(cls, rows: Sequence[SamplingRow]) -> SamplingBatch:
        return cls(
            rows,
            [i for i, row in enumerate(rows) if not row.params.greedy],
            [i for i, row in enumerate(rows) if row.edits_logits],
            [i for i, row in enumerate(rows) if row.params.logprobs is not None],
        )


@dataclass(slots=True)
class SamplerOutput:
    token_ids: Tensor  # int64 [N]
    logprobs: list[TokenLogprob | None] | None = None
    nan_rows: list[int] = field(default_factory=list)  # rows whose logits held NaN or nothing finite: no valid choice


def sample(logits_NV: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """One token a row. `logits_NV` is float32 and may be overwritten."""
    # NaN anywhere makes the maximum NaN; a row of -inf alone has no maximum to speak of.
    top_N, greedy_N = logits_NV.max(dim=-1)
    bad = (~(top_N > -torch.inf)).tolist()
    out = SamplerOutput(greedy_N, nan_rows=[i for i, is_bad in enumerate(bad) if is_bad])
    raw_NV = logits_NV.index_select(0, _index(batch.logprobs, logits_NV)) if batch.logprobs else None
    if batch.edited:
        for i in batch.edited:
            _edit(logits_NV[i], batch.rows[i])
        edited = _index(batch.edited, logits_NV)
        out.token_ids[edited] = logits_NV.index_select(0, edited).argmax(dim=-1)
    drawn = [i for i in batch.drawn if not bad[i]]
    if drawn:
        index = _index(drawn, logits_NV)
        chosen = _draw(logits_NV.index_select(0, index), [batch.rows[i] for i in drawn])
        out.token_ids[index] = chosen
    if raw_NV is not None:
        most = max(batch.rows[i].params.logprobs or 0 for i in batch.logprobs)
        found = logprobs_of(raw_NV, out.token_ids[_index(batch.logprobs, logits_NV)].tolist(), most)
        out.logprobs = [None] * len(batch.rows)
        for i, entry in zip(batch.logprobs, found, strict=True):
            del entry.top[batch.rows[i].params.logprobs or 0 :]
            out.logprobs[i] = entry
    return out


def logprobs_of(logits_NV: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """log-softmax of each row's token, its rank, and the `top` most likely tokens."""
    ids_N1 = torch.tensor(token_ids, device=logits_NV.device).unsqueeze(1)
    logprobs_NV = logits_NV.float().log_softmax(dim=-1)
    own_N1 = logprobs_NV.gather(1, ids_N1)
    ranks = ((logprobs_NV > own_N1).sum(dim=-1) + 1).tolist()
    best = logprobs_NV.topk(min(top, logits_NV.shape[-1]), dim=-1) if top else None
    values, ids = ([[]] * len(token_ids),) * 2 if best is None else (best.values.tolist(), best.indices.tolist())
    return [
        TokenLogprob(token_id=token, logprob=own, rank=rank, top=list(zip(row_ids, row_values, strict=True)))
        for token, own, rank, row_ids, row_values in zip(
            token_ids, own_N1.squeeze(1).tolist(), ranks, ids, values, strict=True
        )
    ]


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _edit(logits_V: Tensor, row: SamplingRow) -> None:
    """Penalties, then bias, then the mask; in place."""
    params, device = row.params, logits_V.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor([*{*row.prompt_token_ids, *row.output_token_ids}], dtype=torch.int64, device=device)
        if seen.numel():
            at = logits_V[seen]
            logits_V[seen] = torch.where(at > 0, at / params.repetition_penalty, at * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        output = torch.tensor(list(row.output_token_ids), dtype=torch.int64, device=device)
        ids, counts = output.unique(return_counts=True)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
    if row.masked_token_ids:
        logits_V[torch.tensor(list(row.masked_token_ids), dtype=torch.int64, device=device)] = -torch.inf


def _draw(logits_NV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token a row from the tempered and filtered distribution."""
    column = lambda values: torch.tensor(values, dtype=torch.float32, device=logits_NV.device).unsqueeze(1)  # noqa: E731
    # Shifted so that the best token stands at 0: a tiny temperature then can't overflow.
    logits_NV = logits_NV - logits_NV.max(dim=-1, keepdim=True).values
    logits_NV = logits_NV.nan_to_num_(nan=0.0) / column([row.params.temperature for row in rows])
    uniform_N1 = column([uniform(row.seed, row.position) for row in rows])
    params = [row.params for row in rows]
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if not cut:
        return _inverse_cdf(logits_NV.softmax(dim=-1), uniform_N1)
    chosen_N = torch.empty(len(rows), dtype=torch.int64, device=logits_NV.device)
    whole = [i for i in range(len(rows)) if i not in set(cut)]
    if whole:
        index = _index(whole, logits_NV)
        chosen_N[index] = _inverse_cdf(logits_NV[index].softmax(dim=-1), uniform_N1[index])
    index = _index(cut, logits_NV)
    chosen_N[index] = _draw_cut(logits_NV[index], uniform_N1[index], [params[i] for i in cut])
    return chosen_N


def _draw_cut(logits_NV: Tensor, uniform_N1: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Rows with top-k, top-p or min-p: from the most likely candidates, or all where those don't reach the cut."""
    vocab = logits_NV.shape[-1]
    column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=logits_NV.device).unsqueeze(1)  # noqa: E731
    top_k = column([min(p.top_k, vocab) if p.top_k else vocab for p in params], torch.int64)
    top_p = column([p.top_p for p in params], torch.float32)
    min_p = column([p.min_p for p in params], torch.float32)
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)

    def draw(count: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, whether the candidates were enough) of some rows."""
        best = logits_NV[rows].topk(count, dim=-1)  # sorted, most likely first
        probs_NK = (best.values - total_N1[rows]).exp()
        rank_K = torch.arange(count, device=logits_NV.device)
        keep_NK = rank_K < top_k[rows]
        # top-p is over what top-k left, so its share is of their sum.
        mass_N1 = probs_NK.masked_fill(~keep_NK, 0).sum(dim=-1, keepdim=True)
        unlimited_N1 = top_k[rows] > count
        mass_N1 = torch.where(unlimited_N1, torch.ones_like(mass_N1), mass_N1)
        before_NK = probs_NK.cumsum(dim=-1) - probs_NK
        within_p = before_NK < top_p[rows] * mass_N1
        above_min = probs_NK >= min_p[rows] * probs_NK[:, :1]
        keep_NK &= (within_p | (top_p[rows] >= 1)) & above_min
        keep_NK[:, 0] = True
        partly_N1 = unlimited_N1 & (top_k[rows] < vocab)  # top-k itself ends beyond the candidates
        enough_N = ~((keep_NK[:, -1:] & unlimited_N1) | partly_N1).squeeze(1)
        picked = _inverse_cdf(probs_NK.masked_fill(~keep_NK, 0), uniform_N1[rows])
        return best.indices.gather(1, picked.unsqueeze(1)).squeeze(1), enough_N

    everything = torch.arange(len(params), device=logits_NV.device)
    chosen_N, enough_N = draw(min(CANDIDATES, vocab), everything)
    far = everything[~enough_N]
    if far.numel():
        chosen_N[far] = draw(vocab, far)[0]
    return chosen_N


def _inverse_cdf(weights_NK: Tensor, uniform_N1: Tensor) -> Tensor:
    """The first index whose cumulative weight passes uniform * sum; always one with a weight above zero."""
    cdf_NK = weights_NK.double().cumsum(dim=-1)
    target_N1 = uniform_N1.double() * cdf_NK[:, -1:]
    return torch.searchsorted(cdf_NK, target_N1, right=True).squeeze(1).clamp_(max=weights_NK.shape[-1] - 1)
