"""`SamplingParams`: how one request wants its tokens chosen. No torch in here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stenograph.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
SEED_RANGE = 2**63


@dataclass(slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token and of the most likely alternatives at its position."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: list[tuple[int, float]] = field(default_factory=list)  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; validated on construction, raises `RequestError` naming the field.

    temperature       0 is greedy; otherwise logits are divided by it
    top_k             keep the k most likely tokens; 0 or -1: all
    top_p             keep the smallest set of tokens whose probability reaches it, in (0, 1]
    min_p             drop tokens less likely than min_p times the most likely one, in [0, 1]
    seed              same seed, same request: same tokens, whatever else is in the batch; None: drawn afresh
    repetition_penalty  > 0; divides positive and multiplies negative logits of tokens seen in prompt or output
    presence_penalty, frequency_penalty  in [-2, 2]; OpenAI's, over output tokens alone
    logit_bias        token id -> value in [-100, 100], added to the logits; at most 1024 entries
    logprobs          None: none; k: the chosen token's and the k most likely ones' log-probability, of the
                      distribution before temperature, penalties and masks
    prompt_logprobs   likewise for every prompt token but the first
    stop              strings that end the answer (cut before the match unless include_stop_str_in_output)
    stop_token_ids    ids that end the answer; at most 1024
    min_tokens        no end-of-sequence token, stop id or stop string before this many tokens
    max_tokens        None: up to the context length
    ignore_eos        the model's own end ids do not stop; the request's stop strings and ids still do
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop: Any = self.stop
        self._normalise("stop", (stop,) if isinstance(stop, str) else _as_tuple("stop", stop))
        self._normalise("stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is None:
            self._normalise("logit_bias", {})
        if self.top_k == -1:
            self._normalise("top_k", 0)
        self._check_int("n", 1, MAX_N)
        self._check_float("temperature", 0.0, None)
        self._check_int("top_k", 0, None)
        self._check_float("top_p", 0.0, 1.0, open_low=True)
        self._check_float("min_p", 0.0, 1.0)
        self._check_int("seed", -SEED_RANGE, SEED_RANGE - 1, optional=True)
        self._check_float("repetition_penalty", 0.0, None, open_low=True)
        self._check_float("presence_penalty", -2.0, 2.0)
        self._check_float("frequency_penalty", -2.0, 2.0)
        self._check_int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._check_int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._check_int("min_tokens", 0, None)
        self._check_int("max_tokens", 0, None, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}.", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS}.", param="stop")
        for s in self.stop:
            if not isinstance(s, str) or not s:
                raise RequestError("stop holds an empty string or something that is not a string.", param="stop")
            if len(s) > MAX_STOP_LENGTH:
                raise RequestError(f"a stop string has {len(s)} characters; at most {MAX_STOP_LENGTH}.", param="stop")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias does not map token ids to numbers.", param="logit_bias")
        # Both are copied for each of the n sequences, and looked through at each token.
        for name, most in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_LOGIT_BIASES)):
            if len(getattr(self, name)) > most:
                raise RequestError(f"{name} holds {len(getattr(self, name))} entries; at most {most}.", param=name)
        for t in self.stop_token_ids:
            if isinstance(t, bool) or not isinstance(t, int) or t < 0:
                raise RequestError(f"stop_token_ids holds {t!r}, not a token id.", param="stop_token_ids")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"logit_bias key {token!r} is not a token id.", param="logit_bias")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias of token {token} is {bias!r}; it must be a number in [-100, 100].", param="logit_bias"
                )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be true or false.", param=name)

    def _normalise(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen once it has been constructed

    def _check_int(self, name: str, low: int, high: int | None, *, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} is {value!r}; it must be an integer.", param=name)
        if value < low or (high is not None and value > high):
            bound = f"at least {low}" if high is None else f"from {low} to {high}"
            raise RequestError(f"{name} is {value}; it must be {bound}.", param=name)

    def _check_float(self, name: str, low: float, high: float | None, *, open_low: bool = False) -> None:
        value: Any = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RequestError(f"{name} is {value!r}; it must be a number.", param=name)
        in_range = value > low if open_low else value >= low  # false for NaN
        if not in_range or value > (sys.float_info.max if high is None else high):
            left = "(" if open_low else "["
            span = f"{left}{low:g}, {high:g}]" if high is not None else f"{'above' if open_low else 'at least'} {low:g}"
            raise RequestError(f"{name} is {value}; it must be {'in ' if high is not None else ''}{span}.", param=name)

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken: temperature 0 (or so small that division would overflow)."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_against(self, *, vocab_size: int) -> None:
        """Checks that need the model; raises `RequestError`."""
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"logit_bias names token {token}; the vocabulary has {vocab_size}.", param="logit_bias"
                )
        for token in self.stop_token_ids:
            if token >= vocab_size:
                raise RequestError(
                    f"stop_token_ids names token {token}; the vocabulary has {vocab_size}.", param="stop_token_ids"
                )

    def replace(self, **changes: Any) -> SamplingParams:
        return replace(self, **changes)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name} is {value!r}; it must be a list.", param=name)
    return tuple(value)
