from __future__ import annotations

import pickle

import pytest

from stenograph.errors import RequestError
from stenograph.sampling.params import MAX_N, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SEED_RANGE, SamplingParams

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NO_NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e400, 10**400, "0.5", True, None, [1.0])
COUNTS = ("n", "top_k", "seed", "logprobs", "prompt_logprobs", "min_tokens", "max_tokens")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_finite_number_is_refused(name, value):
    with pytest.raises(RequestError, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name and caught.value.status == 400


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), "1", True, [1]])
def test_what_is_no_integer_is_refused(name, value):
    with pytest.raises(RequestError, match=f"^{name} is .*must be an integer") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("n", (1, MAX_N), (0, -1, MAX_N + 1, 10**6)),
        ("temperature", (0, 0.0, 1e-40, 2, 100.0), (-1, -1e-9)),
        ("top_k", (0, -1, 1, 10**12), (-2,)),
        ("top_p", (1e-9, 1, 1.0), (0, 0.0, -0.1, 1.0001, 2)),
        ("min_p", (0, 1.0), (-0.1, 1.1)),
        ("seed", (None, 0, -1, SEED_RANGE - 1, -SEED_RANGE), (SEED_RANGE, 10**30)),
        ("repetition_penalty", (1e-9, 1, 2.0, 1e300), (0, 0.0, -1)),
        ("presence_penalty", (-2, 2.0), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 2.0), (-2.1, 2.1)),
        ("logprobs", (None, 0, 20), (-1, 21, 10**6)),
        ("prompt_logprobs", (None, 0, 20), (-1, 21)),
        ("min_tokens", (0, 16), (-1,)),
        ("max_tokens", (None, 0, 10**9), (-1,)),
    ],
)
def test_bounds(name, inside, outside):
    for value in inside:
        SamplingParams(**{name: value})
    for value in outside:
        with pytest.raises(RequestError, match=f"^{name} is ") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_an_error_says_value_and_range():
    with pytest.raises(RequestError, match=r"^top_p is 1.5; it must be in \(0, 1\]\.$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"^n is 129; it must be from 1 to 128\.$"):
        SamplingParams(n=129)
    with pytest.raises(RequestError, match=r"^temperature is -1; it must be at least 0\.$"):
        SamplingParams(temperature=-1)


@pytest.mark.parametrize(
    "stop", ["", ("",), ["a", ""], [1], 5, {"a": 1}, ["x"] * (MAX_STOP_STRINGS + 1), "x" * (MAX_STOP_LENGTH + 1)]
)
def test_stop_strings_that_are_refused(stop):
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=stop)
    assert caught.value.param == "stop"


def test_stop_is_normalised():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


@pytest.mark.parametrize("ids", [[-1], [1.5], [True], ["1"], 5, "12", [1] * 1025])
def test_stop_token_ids_that_are_refused(ids):
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop_token_ids=ids)
    assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize(
    "bias",
    [{"abc": 1}, {1.0: 1}, {True: 1}, {1: 1e30}, {1: float("nan")}, {1: "1"}, {1: True}, {1: -101}, [1], {1: None}, 5,
     dict.fromkeys(range(1025), 1)],
)  # fmt: skip
def test_logit_biases_that_are_refused(bias):
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("token", [320, 321, -1, 10**12])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(RequestError, match="320") as caught:
        SamplingParams(logit_bias={token: 1.0}).check_against(vocab_size=320)
    assert caught.value.param == "logit_bias"
    if token > 0:
        with pytest.raises(RequestError, match="320"):
            SamplingParams(stop_token_ids=[token]).check_against(vocab_size=320)


def test_the_last_id_of_the_vocabulary_is_accepted():
    SamplingParams(logit_bias={319: 100, 0: -100}, stop_token_ids=[319]).check_against(vocab_size=320)


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"])
def test_switches_are_booleans(name):
    with pytest.raises(RequestError, match=f"^{name} is 'no'; it must be true or false"):
        SamplingParams(**{name: "no"})


def test_min_tokens_above_max_tokens():
    with pytest.raises(RequestError, match="min_tokens is 5, above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=5, max_tokens=None)


def test_frozen_and_replaced():
    params = SamplingParams(temperature=0.5, stop="x")
    with pytest.raises(AttributeError):
        params.temperature = 1.0
    assert params.replace(temperature=0.7) == SamplingParams(temperature=0.7, stop="x")
    with pytest.raises(RequestError):
        params.replace(temperature=-1)
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(temperature=0, top_p=0.1, top_k=5, min_p=0.5, seed=3), True),
        (SamplingParams(temperature=1e-6), True),
        (SamplingParams(temperature=1e-40), True),
        (SamplingParams(top_k=1), True),
        (SamplingParams(), False),
        (SamplingParams(temperature=1e-3), False),
        (SamplingParams(top_k=2), False),
    ],
)
def test_greedy(params, greedy):
    assert params.greedy is greedy
