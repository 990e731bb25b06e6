"""Choosing the next token of every row, on the device that holds the logits.

A row's choice depends on its own logits, parameters, seed and position, on nothing else in the batch: one uniform
number a row comes from a counter-based hash of (seed, position), and the token is where the cumulative distribution
passes it. Order: repetition penalty, presence and frequency penalties, bias, mask, temperature, then what top-k, top-p
(a share of what top-k left) and min-p all keep.

Shapes: N rows, V vocabulary, K candidates kept of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stenograph.sampling.params import SamplingParams, TokenLogprob

CANDIDATES = 256
"""Tokens looked at first for top-k and top-p; a row whose cut lies further out is sorted whole."""
HUGE = 1e30
"""Temperatures and repetition penalties beyond it act like it: float32 arithmetic then stays finite."""
BLOCK = 128
"""Tokens looked at together for the largest; it divides most vocabularies."""
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
    """In [0, 1), 53 bits, from splitmix64's finaliser (Steele, Lea and Flood, 2014) over the seed and the position."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & MASK_64
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        z = ((z ^ (z >> 30)) * multiplier) & MASK_64
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


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
    nan_rows: list[int] = field(default_factory=list)  # rows without a choice: NaN or +inf in them, or nothing finite


def sample(logits_NV: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """One token a row. `logits_NV` is float32 and may be overwritten."""
    top_N, token_ids_N = _maximum(logits_NV)  # NaN anywhere makes the maximum NaN
    raw_NV = logits_NV.index_select(0, _index(batch.logprobs, logits_NV)) if batch.logprobs else None
    bad = [not math.isfinite(top) for top in top_N.tolist()]
    if batch.edited:
        for i in batch.edited:
            _edit(logits_NV[i], batch.rows[i])
        edited = _index(batch.edited, logits_NV)
        tops, token_ids_N[edited] = logits_NV.index_select(0, edited).max(dim=-1)
        for i, top in zip(batch.edited, tops.tolist(), strict=True):
            bad[i] |= not math.isfinite(top)  # everything masked
    out = SamplerOutput(token_ids_N, nan_rows=[i for i, is_bad in enumerate(bad) if is_bad])
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
            if not bad[i]:
                out.logprobs[i] = entry
    return out


def _maximum(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest value and the first place it stands at.

    Several rows on a CPU go block by block: `max` with its index runs through a row one number at a time, `amax` a
    vector at a time (16 rows of 49152: 200 us against 46).
    """
    rows, vocab = logits_NV.shape
    if logits_NV.device.type != "cpu" or rows == 1 or vocab % BLOCK:
        top_N, index_N = logits_NV.max(dim=-1)
        return top_N, index_N
    blocks_NCB = logits_NV.view(rows, vocab // BLOCK, BLOCK)
    top_N, block_N = blocks_NCB.amax(dim=-1).max(dim=-1)
    within_N = blocks_NCB[torch.arange(rows), block_N].argmax(dim=-1)
    return top_N, block_N * BLOCK + within_N


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


def _edit(logits_V: Tensor, row: SamplingRow) -> None:
    """Penalties, then bias, then the mask; in place."""
    params, device = row.params, logits_V.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor([*{*row.prompt_token_ids, *row.output_token_ids}], dtype=torch.int64, device=device)
        if seen.numel():
            at = logits_V[seen]
            penalty = min(max(params.repetition_penalty, 1 / HUGE), HUGE)
            logits_V[seen] = torch.where(at > 0, at / penalty, at * penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        output = torch.tensor(list(row.output_token_ids), dtype=torch.int64, device=device)
        ids, counts = output.unique(return_counts=True)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
    # A checkpoint may name an end token that its own output layer lacks.
    masked = [token for token in row.masked_token_ids if token < logits_V.shape[0]]
    if masked:
        logits_V[torch.tensor(masked, dtype=torch.int64, device=device)] = -torch.inf


def _draw(logits_NV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token a row from the tempered and filtered distribution. Overwrites the logits."""
    # Shifted so that the best token stands at 0: a tiny temperature then can't overflow.
    logits_NV -= logits_NV.amax(dim=-1, keepdim=True)
    logits_NV /= _column([min(row.params.temperature, HUGE) for row in rows], torch.float32, logits_NV)
    uniform_N1 = _column([uniform(row.seed, row.position) for row in rows], torch.float64, logits_NV)
    chosen_N = torch.empty(len(rows), dtype=torch.int64, device=logits_NV.device)
    cut = [row.params.top_k > 0 or row.params.top_p < 1 for row in rows]
    for draw, wanted in ((_draw_whole, False), (_draw_cut, True)):
        some = [i for i, is_cut in enumerate(cut) if is_cut is wanted]
        if some:
            index = _index(some, logits_NV)
            chosen_N[index] = draw(logits_NV[index], uniform_N1[index], [rows[i].params for i in some])
    return chosen_N


def _draw_whole(logits_NV: Tensor, uniform_N1: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Rows with at most min-p, which needs no order. The best logit of each row is 0."""
    if any(p.min_p > 0 for p in params):
        floor_N1 = _column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], torch.float32, logits_NV)
        logits_NV = logits_NV.masked_fill(logits_NV < floor_N1, -torch.inf)
    return _inverse_cdf(logits_NV.softmax(dim=-1), uniform_N1)


def _draw_cut(logits_NV: Tensor, uniform_N1: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Rows with top-k or top-p: from the most likely candidates, or all where those don't reach the cut."""
    vocab = logits_NV.shape[-1]
    top_k = _column([min(p.top_k, vocab) if p.top_k else vocab for p in params], torch.int64, logits_NV)
    top_p = _column([p.top_p for p in params], torch.float64, logits_NV)
    min_p = _column([p.min_p for p in params], torch.float64, logits_NV)
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)

    def draw(count: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, whether the candidates were enough) of some rows."""
        best = logits_NV[rows].topk(count, dim=-1)  # sorted, most likely first
        probs_NK = (best.values - total_N1[rows]).double().exp()
        in_k_NK = torch.arange(count, device=logits_NV.device) < top_k[rows]
        upto_NK = probs_NK.masked_fill(~in_k_NK, 0).cumsum(dim=-1)
        beyond_N1 = top_k[rows] > count  # without a top-k, or one that ends beyond the candidates
        share_N1 = torch.where(beyond_N1, torch.ones_like(top_p[rows]), upto_NK[:, -1:])
        in_p_NK = (upto_NK - probs_NK < top_p[rows] * share_N1) | (top_p[rows] >= 1)
        keep_NK = in_k_NK & in_p_NK & (probs_NK >= min_p[rows] * probs_NK[:, :1])
        keep_NK[:, 0] = True
        enough_N1 = ~beyond_N1 | (~keep_NK[:, -1:] & (top_k[rows] == vocab))
        picked_N = _inverse_cdf(probs_NK.masked_fill(~keep_NK, 0), uniform_N1[rows])
        return best.indices.gather(1, picked_N.unsqueeze(1)).squeeze(1), enough_N1.squeeze(1)

    everything = torch.arange(len(params), device=logits_NV.device)
    chosen_N, enough_N = draw(min(CANDIDATES, vocab), everything)
    far = everything[~enough_N]
    if far.numel():
        chosen_N[far] = draw(vocab, far)[0]
    return chosen_N


def _inverse_cdf(weights_NK: Tensor, uniform_N1: Tensor) -> Tensor:
    """The first index whose cumulative weight passes uniform * sum; always one with a weight above zero."""
    cdf_NK = weights_NK.cumsum(dim=-1, dtype=torch.float64)
    target_N1 = uniform_N1 * cdf_NK[:, -1:]
    return torch.searchsorted(cdf_NK, target_N1, right=True).squeeze(1).clamp_(max=weights_NK.shape[-1] - 1)


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _column(values: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)
