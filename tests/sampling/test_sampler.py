from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stenograph.sampling import sampler
from stenograph.sampling.params import SamplingParams
from stenograph.sampling.sampler import SamplingBatch, SamplingRow, logprobs_of, sample, uniform
from tests.sampling import reference

GREEDY = SamplingParams(temperature=0)


def logits_of(rows: int, vocab: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(params: SamplingParams, *, seed: int = 1, position: int = 7, **tokens) -> SamplingRow:
    return SamplingRow(params=params, seed=seed, position=position, **tokens)


def run(logits_NV: torch.Tensor, rows: list[SamplingRow]) -> sampler.SamplerOutput:
    return sample(logits_NV.clone(), SamplingBatch.build(rows))


def tokens(logits_NV: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return run(logits_NV, rows).token_ids.tolist()


def many(logits_V: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """Tokens drawn at `count` positions of one sequence."""
    return tokens(logits_V.expand(count, -1), [row(params, seed=42, position=i) for i in range(count)])


# -- the uniform numbers


def test_uniform_numbers_are_uniform_and_independent_of_neighbours():
    for numbers in ([uniform(5, i) for i in range(20_000)], [uniform(i, 5) for i in range(20_000)]):
        assert min(numbers) >= 0 and max(numbers) < 1
        counts = [0] * 50
        pairs = [0] * 25
        for number, following in pairwise(numbers):
            counts[int(number * 50)] += 1
            pairs[int(number * 5) * 5 + int(following * 5)] += 1
        for observed in (counts, pairs):
            assert_follows(observed, [1 / len(observed)] * len(observed))


def test_seeds_and_positions_give_different_numbers():
    seeds = [0, 1, 2, -1, -2, 2**62, 2**63 - 1, -(2**63), 42]
    numbers = {uniform(seed, position) for seed in seeds for position in range(200)}
    assert len(numbers) == len(seeds) * 200
    assert uniform(3, 4) == uniform(3, 4)


def assert_follows(observed: list[int], probs: list[float]) -> None:
    """Chi-square, over the outcomes that are expected at least five times; five deviations wide."""
    total = sum(observed)
    likely = [i for i, p in enumerate(probs) if p * total >= 5]
    statistic = sum((observed[i] - probs[i] * total) ** 2 / (probs[i] * total) for i in likely)
    freedom = max(1, len(likely) - 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    rest = sum(probs) - sum(probs[i] for i in likely)
    assert sum(observed) - sum(observed[i] for i in likely) <= rest * total + 5 * math.sqrt(rest * total + 1)


# -- distributions


@pytest.mark.parametrize("candidates", [4, 256])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.8, top_k=9),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_tokens_follow_the_distribution(params, candidates, monkeypatch):
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    logits_V = logits_of(1, 40, scale=1.5)[0]
    expected = reference.distribution(logits_V.tolist(), params)
    observed = [0] * 40
    for token in many(logits_V, params, 5000):
        observed[token] += 1
    assert_follows(observed, expected)
    assert all(p > 0 for p, count in zip(expected, observed, strict=True) if count)


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.integers(2, 60),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    seed=st.integers(0, 2**32),
    candidates=st.sampled_from([1, 3, 8, 256]),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0.05, 4.0),
        top_k=st.sampled_from([0, 2, 3, 5, 10, 59, 60, 1000]),
        top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
        min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    ),
)
def test_each_token_is_the_one_at_its_uniform_number(vocab, scale, seed, candidates, params):
    """The choice itself against a whole sort: cumulative probability, in the order that the sampler goes by."""
    logits_V = logits_of(1, vocab, seed=seed, scale=scale)[0]
    values = sorted(logits_V.tolist())
    assume(min(b - a for a, b in pairwise(values)) > 1e-5)
    before = sampler.CANDIDATES
    sampler.CANDIDATES = candidates
    try:
        chosen = tokens(logits_V.expand(12, -1), [row(params, seed=seed, position=i) for i in range(12)])
    finally:
        sampler.CANDIDATES = before
    ordered = params.top_k > 0 or params.top_p < 1
    slack = 1e-5
    # A cut within rounding of top_p may fall on either side.
    cuts = {params.top_p} if params.top_p == 1 else {max(params.top_p - slack, 1e-9), min(params.top_p + slack, 1.0)}
    for position, token in enumerate(chosen):
        number = uniform(seed, position)
        possible = False
        for top_p in cuts:
            probs = reference.distribution(logits_V.tolist(), params, top_p=top_p)
            order = sorted(range(vocab), key=lambda t: -probs[t]) if ordered else range(vocab)
            below = sum(probs[t] for t in list(order)[: list(order).index(token)])
            inside = below - slack <= number <= below + probs[token] + slack
            possible |= probs[token] > 0 and inside
        assert possible, (position, token)


def test_every_token_of_a_mixed_batch_lies_in_its_allowed_set():
    """5,000 tokens under top-k, top-p, min-p and temperature, each with its log-probability."""
    kinds = [
        SamplingParams(top_k=20, logprobs=0),
        SamplingParams(top_p=0.8, logprobs=0),
        SamplingParams(min_p=0.05, logprobs=0),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05, logprobs=0),
        SamplingParams(temperature=0, top_p=0.8, logprobs=0),
    ]
    for step in range(50):
        logits_NV = logits_of(100, 400, seed=step, scale=2.0)
        rows = [row(kinds[i % 5], seed=i, position=step) for i in range(100)]
        out = run(logits_NV, rows)
        raw_NV = logits_NV.log_softmax(dim=-1)
        for i, token in enumerate(out.token_ids.tolist()):
            params = rows[i].params
            if params.greedy:
                assert token == int(logits_NV[i].argmax())
            else:
                top_p = min(1.0, params.top_p + 1e-5)
                assert reference.distribution(logits_NV[i].tolist(), params, top_p=top_p)[token] > 0
            assert out.logprobs[i].token_id == token
            assert out.logprobs[i].logprob == pytest.approx(float(raw_NV[i, token]), abs=1e-5)


def test_ties_at_the_cut_keep_exactly_k():
    logits_V = torch.zeros(1000)
    assert len(set(many(logits_V, SamplingParams(top_k=3), 300))) == 3
    assert len(set(many(logits_V, SamplingParams(), 300))) > 200


def test_defaults_vary_even_beside_a_top_k_of_one():
    logits_NV = logits_of(1, 500, scale=1.5)[0].expand(21, -1)
    rows = [row(SamplingParams(temperature=1.5), seed=i) for i in range(20)] + [row(SamplingParams(top_k=1))]
    assert len(set(tokens(logits_NV, rows)[:20])) > 10


def test_top_p_is_a_share_of_what_top_k_left_even_beyond_the_candidates(monkeypatch):
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    logits_V = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.03, 0.02]).log()
    params = SamplingParams(top_k=5, top_p=0.81)  # of 0.98: reached with the second token
    assert set(many(logits_V, params, 300)) == {0, 1}
    assert set(many(logits_V, params.replace(top_k=0), 300)) == {0, 1, 2}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_uniform_range_give_tokens_that_can_be_chosen(number, token, monkeypatch):
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: number)
    logits_NV = torch.tensor([[-torch.inf, 0.3, 0.2, 0.1, -torch.inf]])
    for params in (SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(min_p=0.5)):
        assert tokens(logits_NV, [row(params)]) == [token]


# -- rows that mind their own business

MIXED = [
    (SamplingParams(temperature=0.8, seed=42), {}),
    (SamplingParams(temperature=1.0), {}),
    (GREEDY, {}),
    (SamplingParams(temperature=0, repetition_penalty=2.0), {"prompt_token_ids": [5, 9], "output_token_ids": [3, 3]}),
    (SamplingParams(frequency_penalty=1.05, top_k=40), {"output_token_ids": [1, 2, 2, 2, 700]}),
    (SamplingParams(presence_penalty=-2.0, top_p=0.7), {"output_token_ids": [8] * 40}),
    (SamplingParams(min_p=0.2, logit_bias={11: 9.0}), {}),
    (SamplingParams(top_k=1, seed=5), {"masked_token_ids": [0, 1, 2]}),
    (SamplingParams(top_p=0.999, temperature=2.5), {}),  # its cut lies beyond the candidates
    (SamplingParams(top_k=600, logprobs=3), {}),
]


def test_a_row_is_the_same_alone_and_in_any_company():
    logits_NV = logits_of(len(MIXED), 900)
    rows = [row(params, seed=i, position=i * 3, **kw) for i, (params, kw) in enumerate(MIXED)]
    solo = [tokens(logits_NV[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        order = torch.randperm(len(rows), generator=generator)[: int(torch.randint(2, 11, (), generator=generator))]
        chosen = tokens(logits_NV[order], [rows[i] for i in order.tolist()])
        assert chosen == [solo[i] for i in order.tolist()]


def test_a_penalty_leaves_the_other_rows_logits_alone():
    logits_NV = logits_of(8, 300)
    rows = [row(SamplingParams(temperature=1.0), seed=i, output_token_ids=list(range(i))) for i in range(8)]
    rows[3] = row(SamplingParams(frequency_penalty=1.05), seed=3, output_token_ids=[0, 0, 7])
    batch_logits = logits_NV.clone()
    sample(batch_logits, SamplingBatch.build(rows))
    others = [i for i in range(8) if i != 3]
    assert torch.equal(batch_logits[others], logits_NV[others])
    assert not torch.equal(batch_logits[3], logits_NV[3])


# -- penalties, bias, masks


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    params=st.builds(
        SamplingParams,
        temperature=st.just(0),
        repetition_penalty=st.sampled_from([1.0, 1.3, 2.0, 0.5, 10.0]),
        presence_penalty=st.sampled_from([0.0, 2.0, -2.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, 2.0, -2.0, 0.3]),
        logit_bias=st.dictionaries(st.integers(0, 29), st.floats(-100, 100), max_size=3),
    ),
    prompt=st.lists(st.integers(0, 29), max_size=12),
    output=st.lists(st.integers(0, 29), max_size=12),
    masked=st.lists(st.integers(0, 40), max_size=4),  # some beyond the vocabulary
)
def test_penalties_match_the_formula(seed, params, prompt, output, masked):
    logits_NV = logits_of(1, 30, seed=seed)
    expected = reference.edited(
        logits_NV[0].tolist(), params, prompt, output, [token for token in masked if token < 30]
    )
    after = logits_NV.clone()
    rows = [row(params, prompt_token_ids=prompt, output_token_ids=output, masked_token_ids=masked)]
    out = sample(after, SamplingBatch.build(rows))
    assert after[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert expected[out.token_ids[0]] == pytest.approx(max(expected), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=2.0),
        SamplingParams(temperature=0, presence_penalty=2.0),
        SamplingParams(temperature=0, frequency_penalty=0.5),
    ],
)
def test_a_penalty_breaks_a_forced_repetition(params):
    logits_NV = torch.tensor([[3.0, 2.0, -1.0, 0.0]])
    assert tokens(logits_NV, [row(GREEDY, output_token_ids=[0] * 4)]) == [0]
    assert tokens(logits_NV, [row(params, output_token_ids=[0] * 4)]) == [1]


def test_presence_and_frequency_count_output_alone_and_repetition_the_prompt_too():
    logits_NV = torch.tensor([[3.0, 2.0]])
    for params in (
        SamplingParams(temperature=0, presence_penalty=2),
        SamplingParams(temperature=0, frequency_penalty=2),
    ):
        assert tokens(logits_NV, [row(params, prompt_token_ids=[0, 0])]) == [0]
    assert tokens(logits_NV, [row(SamplingParams(temperature=0, repetition_penalty=2), prompt_token_ids=[0])]) == [1]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
@pytest.mark.parametrize("temperature", [0, 1e-4, 1.0, 1e300])
def test_absurd_penalties_and_temperatures_stay_finite(penalty, temperature):
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    logits_NV = torch.tensor([[0.0, 2.0, -2.0, 1.0, -torch.inf]])
    rows = [row(params, prompt_token_ids=[0, 1, 2], seed=i) for i in range(50)]
    out = run(logits_NV.expand(50, -1), rows)
    assert out.nan_rows == []
    assert 4 not in out.token_ids.tolist()


def test_masked_tokens_are_never_chosen():
    """All end tokens, not the first one alone, before min_tokens."""
    logits_V = torch.zeros(20)
    logits_V[[2, 11]] = 30.0
    for params in (GREEDY, SamplingParams(), SamplingParams(top_k=5), SamplingParams(temperature=1e300)):
        rows = [row(params, seed=i, masked_token_ids=(2, 11)) for i in range(100)]
        assert not {2, 11} & set(tokens(logits_V.expand(100, -1), rows))
    assert tokens(logits_V.unsqueeze(0), [row(GREEDY)])[0] in (2, 11)


# -- greedy


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, top_p=0.1),
        SamplingParams(temperature=0, top_k=5, min_p=0.5, seed=3),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e-40, top_p=0.5),
        SamplingParams(temperature=1, top_k=1),
        SamplingParams(temperature=2, top_p=1e-9),
        SamplingParams(temperature=1, min_p=1.0),
    ],
)
def test_what_amounts_to_greedy_is_greedy(params):
    logits_NV = torch.cat([logits_of(8, 300, scale=scale) for scale in (0.5, 3.0, 1e4)])
    rows = [row(params, seed=i) for i in range(24)]
    out = run(logits_NV, rows)
    assert out.token_ids.tolist() == logits_NV.argmax(dim=-1).tolist()
    assert out.nan_rows == []


def test_a_small_temperature_is_near_greedy_and_finite():
    logits_NV = logits_of(16, 300, scale=1e5)
    rows = [row(SamplingParams(temperature=1e-4, logprobs=0), seed=i) for i in range(16)]
    out = run(logits_NV, rows)
    assert out.token_ids.tolist() == logits_NV.argmax(dim=-1).tolist()
    assert all(math.isfinite(entry.logprob) for entry in out.logprobs)


# -- log-probabilities


@pytest.mark.parametrize("temperature", [0, 0.2, 1.0])
def test_logprobs_are_those_of_the_raw_distribution(temperature):
    logits_NV = logits_of(6, 50)
    params = SamplingParams(temperature=temperature, logprobs=5, frequency_penalty=2.0, logit_bias={3: 50.0})
    out = run(logits_NV, [row(params, seed=i, output_token_ids=[1, 1]) for i in range(6)])
    raw_NV = logits_NV.double().log_softmax(dim=-1)
    for i, entry in enumerate(out.logprobs):
        best = raw_NV[i].topk(5)
        assert entry.token_id == int(out.token_ids[i])
        assert entry.logprob == pytest.approx(float(raw_NV[i, entry.token_id]), abs=1e-5)
        assert entry.rank == 1 + int((raw_NV[i] > raw_NV[i, entry.token_id]).sum())
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert entry.logprob <= 0 and sum(math.exp(value) for _, value in entry.top) <= 1 + 1e-6


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    logits_NV = logits_of(4, 50)
    out = run(logits_NV, [row(SamplingParams(temperature=0, logprobs=count)) for count in (None, 0, 2, 20)])
    assert out.logprobs[0] is None
    assert [len(entry.top) for entry in out.logprobs[1:]] == [0, 2, 20]
    assert run(logits_NV[:1], [row(GREEDY)]).logprobs is None


def test_more_logprobs_than_tokens():
    out = run(logits_of(1, 3), [row(SamplingParams(logprobs=20))])
    assert len(out.logprobs[0].top) == 3


def test_logprobs_of_given_tokens():
    logits_NV = logits_of(3, 20)
    entries = logprobs_of(logits_NV, [4, 0, 19], 0)
    expected = logits_NV.log_softmax(dim=-1)
    assert [entry.logprob for entry in entries] == pytest.approx(
        [float(expected[i, t]) for i, t in enumerate((4, 0, 19))]
    )
    assert all(entry.top == [] for entry in entries)


# -- rows without a choice


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(logprobs=2), SamplingParams(top_k=5), SamplingParams(min_p=0.1)]
)
def test_a_poisoned_row_is_flagged_alone(value, everywhere, params):
    logits_NV = logits_of(4, 60)
    rows = [row(params, seed=i) for i in range(4)]
    clean = run(logits_NV, rows)
    if everywhere:
        logits_NV[2] = value
    else:
        logits_NV[2, 17] = value
    out = run(logits_NV, rows)
    assert out.nan_rows == [2]
    others = [0, 1, 3]
    assert out.token_ids[others].tolist() == clean.token_ids[others].tolist()
    if params.logprobs is not None:
        assert out.logprobs[2] is None
        assert [out.logprobs[i] for i in others] == [clean.logprobs[i] for i in others]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, repetition_penalty=1.5)])
def test_a_row_with_nothing_left_to_choose_is_flagged(params):
    logits_NV = logits_of(3, 5)
    logits_NV[0] = -torch.inf
    rows = [row(params), row(params, masked_token_ids=range(5)), row(params)]
    assert run(logits_NV, rows).nan_rows == [0, 1]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
)
def test_tokens_at_minus_infinity_are_never_chosen(params):
    logits_V = torch.full((30,), -torch.inf)
    logits_V[[3, 8]] = torch.tensor([0.0, 0.5])
    assert set(many(logits_V, params, 200)) == {3, 8}
