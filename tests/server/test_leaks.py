"""Clients that leave, repeat ids, ask for too much: whatever they do, every KV page comes back."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.chain import chain_text
from tests.server.conftest import ServerProcess
from tests.server.test_completions import complete, events

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"temperature": 0, "max_tokens": 4000, "ignore_eos": True}


def wait_running(server: ServerProcess, count: int) -> None:
    deadline = time.monotonic() + 5
    while (stats := server.stats())["running"] < count:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def wait_none_running(server: ServerProcess) -> float:
    started = time.monotonic()
    while server.stats()["running"]:
        assert time.monotonic() - started < 5
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": "x", "n": 4}, {"prompt": ["x", "y", "z"]}])
def test_a_client_that_leaves_is_aborted(server: ServerProcess, http: httpx.Client, stream: bool, body: Any) -> None:
    before = server.stats()["generated_tokens"]
    with server.client() as leaver:
        if stream:
            with leaver.stream("POST", TEXT, json={**LONG, **body, "stream": True}) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaver.post(TEXT, json={**LONG, **body}, timeout=0.2)
    assert wait_none_running(server) < 1
    server.wait_idle()
    assert server.stats()["generated_tokens"] - before < 8000


def test_streams_closed_right_after_the_request(server: ServerProcess, http: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x", "max_tokens": 500, "stream": true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
    )
    for i in range(200):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(head + body[: len(body) if i % 4 else 20])
    server.wait_idle()
    assert complete(http, prompt=".", max_tokens=3)["choices"][0]["text"] == chain_text(3)


def test_cancelled_at_any_moment_around_a_chunked_prefill(server: ServerProcess) -> None:
    prompt = "." * 1000  # four chunks

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as client:

            async def leave(after: float) -> None:
                task = asyncio.create_task(client.post(TEXT, json={**LONG, "prompt": prompt}))
                await asyncio.sleep(after)
                task.cancel()

            await asyncio.gather(*(leave(0.002 * i) for i in range(100)))
            answer = await client.post(TEXT, json={"prompt": prompt, "temperature": 0, "max_tokens": 6})
            assert answer.json()["choices"][0]["text"] == chain_text(6)

    asyncio.run(main())
    server.wait_idle()


def test_the_same_request_id_at_once_and_again(server: ServerProcess) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as client:

            async def ask(prompt: str, count: int, delay: float) -> str:
                await asyncio.sleep(delay)
                body = {"prompt": prompt, "temperature": 0, "max_tokens": count, "request_id": "same", "id": "same"}
                response = await client.post(TEXT, json=body, headers={"X-Request-Id": "same"})
                assert response.headers["x-request-id"] == "same"
                text: str = response.json()["choices"][0]["text"]
                return text

            texts = await asyncio.gather(ask(".", 90, 0), ask("L", 90, 0), ask("a", 50, 0.05))
            assert texts == [chain_text(90), chain_text(90, after="L"), chain_text(50, after="a")]
            with pytest.raises(httpx.ReadTimeout):
                await client.post(TEXT, json={**LONG, "prompt": "x"}, headers={"X-Request-Id": "same"}, timeout=0.1)
            assert await ask("M", 5, 0) == chain_text(5, after="M")

    asyncio.run(main())
    server.wait_idle()


def test_request_ids_that_could_forge_a_header(http: httpx.Client) -> None:
    for value in (b"a b", b"x" * 129, b"caf\xe9", b""):
        response = http.get("/v1/models", headers=[(b"x-request-id", value)])
        assert (
            response.headers["x-request-id"].encode("latin-1") != value and len(response.headers["x-request-id"]) == 32
        )


def test_a_request_that_cannot_fit_is_refused_and_the_next_one_runs(start: Callable[..., ServerProcess]) -> None:
    server = start(settings={"max_total_tokens": 1024, "max_running_requests": 8, "max_queued_requests": 4})
    with server.client() as http:
        for body in ({"prompt": "x" * 2000, "max_tokens": 1}, {"prompt": "x" * 900, "max_tokens": 200}):
            for more in ({}, {"stream": True}):
                refused = http.post(TEXT, json={**body, **more})
                assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
                assert "1025" in refused.json()["error"]["message"]
        assert complete(http, prompt=".", max_tokens=10)["choices"][0]["text"] == chain_text(10)
        unlimited = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "temperature": 0})
        assert (
            unlimited.json()["usage"]["total_tokens"] == 1025
            and unlimited.json()["choices"][0]["finish_reason"] == "length"
        )
        check_queue(server)
    server.wait_idle()


def check_queue(server: ServerProcess) -> None:
    """8 run, 4 wait; the thirteenth is told to come back, all others are answered."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as client:
            body = {"prompt": ".", "temperature": 0, "max_tokens": 100}
            answers = await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(30)))
            refused = [a for a in answers if a.status_code == 429]
            assert len(refused) == 18 and all(a.headers["retry-after"] == "1" for a in refused)
            assert refused[0].json()["error"]["code"] == "queue_full"
            done = [a for a in answers if a.status_code == 200]
            assert len(done) == 12 and {a.json()["choices"][0]["text"] for a in done} == {chain_text(100)}
            too_many = await client.post(TEXT, json={**body, "n": 13})
            assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
            metrics = (await client.get("/metrics")).text
            assert 'stenograph:requests_refused_total{model_name="chain"} 18.0' in metrics

    asyncio.run(main())


def test_a_crowd_of_which_a_fifth_leaves(server: ServerProcess) -> None:
    """Three times what may run at once, streams and not, of many lengths: each answer that is read is right."""

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=limits) as client:

            async def ask(i: int) -> None:
                body: dict[str, Any] = {"prompt": "." * (1 + i % 50), "temperature": 0, "max_tokens": 5 + i % 60}
                if i % 5 == 0:
                    task = asyncio.create_task(client.post(TEXT, json={**body, "stream": i % 2 == 0}))
                    await asyncio.sleep(0.001 * i)
                    task.cancel()
                elif i % 2:
                    response = await client.post(TEXT, json=body)
                    assert response.json()["choices"][0]["text"] == chain_text(5 + i % 60)
                else:
                    response = await client.post(TEXT, json={**body, "stream": True})
                    assert "".join(c["choices"][0]["text"] for c in events(response)) == chain_text(5 + i % 60)

            await asyncio.gather(*map(ask, range(100)))

    asyncio.run(main())
    server.wait_idle()


def test_metrics_count_what_happened(server: ServerProcess, http: httpx.Client) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, float]:
        text = http.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.name + s.labels.get("finished_reason", "") + s.labels.get("le", ""): s.value for s in samples}

    server.wait_idle()
    before = read()
    complete(http, prompt="hello", max_tokens=7, n=2)
    complete(http, prompt="!", max_tokens=7)
    after = read()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown["stenograph:prompt_tokens_total"] == 11 and grown["stenograph:generation_tokens_total"] == 15
    assert grown["stenograph:request_success_totallength"] == 2 and grown["stenograph:request_success_totalstop"] == 1
    assert (
        grown["stenograph:time_to_first_token_seconds_count"]
        == 3
        == grown["stenograph:e2e_request_latency_seconds_count"]
    )
    assert grown["stenograph:inter_token_latency_seconds_count"] == 12
    assert grown["stenograph:time_to_first_token_seconds_bucket+Inf"] == 3
    assert after["stenograph:kv_pages_free"] == after["stenograph:kv_pages_total"] == server.stats()["total_pages"]
    assert after["stenograph:num_requests_running"] == after["stenograph:num_requests_waiting"] == 0


def test_server_info_tells_the_settings_and_why(http: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert info["model"] == "chain" and info["settings"]["page_size"]["value"] == 16
    assert (
        info["settings"]["page_size"]["source"] == "python" and info["settings"]["chunked_prefill_size"]["value"] == 256
    )
    assert info["stats"]["total_pages"] == 1024
    assert set(info["settings"]["page_size"]) == {"value", "source", "reason", "asked", "history"}
    assert [step["source"] for step in info["settings"]["page_size"]["history"]] == ["default", "python"]
    assert info["warnings"] == info["errors"] == []
