"""What the sampler must do, as plain formulas over lists of float64: one row, whole sort, no batching."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from stenograph.sampling.params import SamplingParams


def edited(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    masked: Sequence[int] = (),
) -> list[float]:
    """Logits after penalties, bias and mask."""
    out = list(logits)
    for token in {*prompt, *output}:
        out[token] *= params.repetition_penalty if out[token] <= 0 else 1 / params.repetition_penalty
    for token, count in Counter(output).items():
        out[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        out[token] += bias
    for token in masked:
        out[token] = -math.inf
    return out


def softmax(logits: Sequence[float]) -> list[float]:
    best = max(logits)
    weights = [math.exp(value - best) for value in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def distribution(logits: Sequence[float], params: SamplingParams, *, top_p: float | None = None) -> list[float]:
    """Probabilities after temperature and the cuts; `top_p` in place of the parameters' own."""
    top_p = params.top_p if top_p is None else top_p
    probs = softmax([value / params.temperature for value in logits])
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if params.top_k:
        order = order[: params.top_k]
    share = sum(probs[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and (mass >= top_p * share or probs[token] < params.min_p * probs[order[0]]):
            break
        kept.append(token)
        mass += probs[token]
    total = sum(probs[token] for token in kept)
    return [probs[token] / total if token in set(kept) else 0.0 for token in range(len(probs))]
