"""Serving under load: requests arrive at a given rate, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stenograph.bench.report import report
from stenograph.errors import StenographError

START_SECONDS = 180


@dataclass(slots=True)
class Answer:
    """Times in seconds since the request was due."""

    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)
    end: float = 0.0
    tokens: int = 0
    failed: str | None = None


def run(
    flags: Sequence[str],
    *,
    url: str | None = None,
    rate: float = 4.0,
    requests: int = 64,
    input_len: int = 128,
    output_len: int = 64,
) -> dict[str, Any]:
    """Loads the server at `url`, or one started for this with `flags`. Raises `StenographError` where none answers."""
    if url is not None:
        return _load(url, rate, requests, input_len, output_len)
    with _own_server(flags) as own:
        return _load(own, rate, requests, input_len, output_len)


def _load(url: str, rate: float, requests: int, input_len: int, output_len: int) -> dict[str, Any]:
    try:
        model = _get(f"{url}/v1/models")["data"][0]["id"]
    except (LookupError, TypeError) as error:
        raise StenographError(f"What answers at {url} lists no models.", remedy="Name a server of this API.") from error
    answers = asyncio.run(_all(url, model, rate, requests, input_len, output_len))
    good = [a for a in answers if a.failed is None and a.first_token is not None]
    span = max(a.end for a in answers) if answers else 0.0
    gaps = [gap for a in good for gap in a.gaps]
    first = [a.first_token for a in good if a.first_token is not None]
    rows = [
        {"measure": "time to first token", "unit": "ms", **_percentiles([1e3 * t for t in first])},
        {"measure": "between chunks", "unit": "ms", **_percentiles([1e3 * t for t in gaps])},
    ]
    return report(
        f"serve, {rate:g} requests/s, {input_len} in, {output_len} out",
        rows,
        model=model,
        answered=len(good),
        failed=len(answers) - len(good),
        output_tok_s=sum(a.tokens for a in good) / span if span else 0.0,
    )


async def _all(url: str, model: str, rate: float, requests: int, input_len: int, output_len: int) -> list[Answer]:
    import httpx

    rng = random.Random(0)
    due, when = 0.0, []
    for _ in range(requests):
        when.append(due)
        due += rng.expovariate(rate)
    start = time.perf_counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        bodies = [
            {
                "model": model,
                "prompt": [rng.randrange(1, 1000) for _ in range(input_len)],
                "max_tokens": output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for _ in range(requests)
        ]
        return await asyncio.gather(*(_one(client, b, start, w) for b, w in zip(bodies, when, strict=True)))


async def _one(client: Any, body: dict[str, Any], start: float, due: float) -> Answer:
    import httpx

    await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
    answer, last = Answer(), 0.0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.failed = f"HTTP {response.status_code}"
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.perf_counter() - start - due
                chunk = json.loads(line.removeprefix("data: "))
                if chunk.get("usage"):
                    answer.tokens = chunk["usage"]["completion_tokens"]
                elif chunk.get("choices") and not chunk["choices"][0].get("finish_reason"):
                    if answer.first_token is None:
                        answer.first_token = now
                    else:
                        answer.gaps.append(now - last)
                    last = now
    except httpx.HTTPError as error:
        answer.failed = type(error).__name__
    answer.end = time.perf_counter() - start
    return answer


def _percentiles(values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None  # noqa: E731
    mean = sum(ordered) / len(ordered) if ordered else None
    return {"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


@contextmanager
def _own_server(flags: Sequence[str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "stenograph.cli", "serve", *flags, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except (urllib.error.URLError, OSError):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise StenographError("The server to measure did not start.", remedy="Try steno serve.") from None
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise StenographError(f"No server answers at {url}: {error}.", remedy="Start one with steno serve.") from error
