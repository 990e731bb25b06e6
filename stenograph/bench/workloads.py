"""The workloads: token ids and lengths, drawn as published so that engines can be compared."""

from __future__ import annotations

import random
from dataclasses import dataclass

from stenograph.sampling.params import SamplingParams

MAX_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`prompts[i]` is answered with exactly `output_lens[i]` tokens."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float = 0.0

    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=self.temperature, max_tokens=count, ignore_eos=True)
            for count in self.output_lens
        ]

    @property
    def num_input(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output(self) -> int:
        return sum(self.output_lens)


def uniform(name: str, *, requests: int, input_len: int, output_len: int, vocab_size: int, seed: int = 0) -> Workload:
    """`requests` prompts of equal length."""
    rng = random.Random(seed)
    top = min(MAX_TOKEN_ID, vocab_size - 1)
    prompts = [[rng.randint(0, top) for _ in range(input_len)] for _ in range(requests)]
    return Workload(name=name, prompts=prompts, output_lens=[output_len] * requests)


def w1(*, requests: int = 256, vocab_size: int, temperature: float = 0.0, limit: int = 1024) -> Workload:
    """256 requests, 100 to 1024 tokens in and out: the offline benchmark of nano-vllm and mini-sglang, same draws."""
    rng = random.Random(0)
    top = min(MAX_TOKEN_ID, vocab_size - 1)
    prompts = [[rng.randint(0, top) for _ in range(rng.randint(100, limit))] for _ in range(requests)]
    return Workload(
        name="W1" if temperature == 0 else f"W1 at temperature {temperature:g}",
        prompts=prompts,
        output_lens=[rng.randint(100, limit) for _ in range(requests)],
        temperature=temperature,
    )


def named(name: str, vocab_size: int, requests: int | None = None) -> Workload:
    """D1, D32, P, W1 or W1T, with another number of requests if asked for."""
    if name == "d1":
        return uniform("D1", requests=requests or 1, input_len=128, output_len=512, vocab_size=vocab_size)
    if name == "d32":
        return uniform("D32", requests=requests or 32, input_len=512, output_len=256, vocab_size=vocab_size)
    if name == "p":
        return uniform("P", requests=requests or 64, input_len=1024, output_len=1, vocab_size=vocab_size)
    if name == "w1":
        return w1(requests=requests or 256, vocab_size=vocab_size)
    if name == "w1t":
        return w1(requests=requests or 256, vocab_size=vocab_size, temperature=0.6)
    raise ValueError(name)


NAMES = ("d1", "d32", "p", "w1", "w1t")
