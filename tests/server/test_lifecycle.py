"""How a server starts, drains, and dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.chain import chain_text
from tests.server.conftest import ROOT, ServerProcess
from tests.server.test_completions import events
from tests.server.test_engine_process import gone

TEXT = "/v1/completions"
SLOW: dict[str, Any] = {"core": "echo", "step_seconds": 0.02}  # 50 tokens a second


def wait_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "a process lives on"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_what_runs_and_refuses_what_comes(
    start: Callable[..., ServerProcess], number: Any
) -> None:
    server = start(settings={"max_running_requests": 5})

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as client:

            async def ask(i: int) -> None:
                body = {"prompt": ".", "temperature": 0, "max_tokens": 200, "stream": i % 2 == 0}
                response = await client.post(TEXT, json=body)
                if body["stream"]:
                    assert "".join(c["choices"][0]["text"] for c in events(response)) == chain_text(200)
                else:
                    assert response.json()["choices"][0]["text"] == chain_text(200)

            asks = [asyncio.create_task(ask(i)) for i in range(10)]  # five run, five wait
            while (await client.get("/server_info")).json()["stats"]["open_sequences"] < 10:
                await asyncio.sleep(0.01)
            server.signal(number)
            while (health := await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            assert health.status_code == 503
            late = await client.post(TEXT, json={"prompt": "x"})
            assert (
                late.status_code == 503
                and late.json()["error"]["code"] == "shutting_down"
                and late.headers["retry-after"]
            )
            assert not all(task.done() for task in asks), "the test has shown nothing"
            await asyncio.gather(*asks)

    asyncio.run(main())
    assert server.wait_exit() == 0 and "Traceback" not in server.output


def test_the_drain_is_limited(start: Callable[..., ServerProcess]) -> None:
    server = start(**SLOW, limits={"drain_seconds": 0.5})
    with (
        server.client() as http,
        http.stream("POST", TEXT, json={"prompt": "ab", "max_tokens": 4000, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        told = [line for line in lines if line][-1]
        assert json.loads(told.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert server.wait_exit(5) == 0


def test_a_second_signal_ends_it_at_once(start: Callable[..., ServerProcess]) -> None:
    server = start(**SLOW)
    engine = server.engine_pid()
    with server.client() as http, http.stream("POST", TEXT, json={"prompt": "ab", "max_tokens": 4000, "stream": True}):
        server.signal(signal.SIGINT)
        time.sleep(0.3)
        server.signal(signal.SIGINT)
        assert server.wait_exit(5) != 0
    wait_gone([engine], 5)


def test_told_to_stop_while_loading(start: Callable[..., ServerProcess]) -> None:
    server = start(wait=False)
    deadline = time.monotonic() + 20
    while True:
        try:
            engine = server.engine_pid()
            break
        except LookupError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    time.sleep(0.3)
    server.signal(signal.SIGTERM)
    server.wait_exit(10)
    wait_gone([engine], 5)


def test_when_the_http_process_is_killed_the_engine_leaves(start: Callable[..., ServerProcess]) -> None:
    server = start(**SLOW)
    engine = server.engine_pid()
    with (
        server.client() as http,
        http.stream("POST", TEXT, json={"prompt": "ab", "max_tokens": 4000, "stream": True}) as response,
    ):
        parts = response.iter_bytes()
        next(parts)
        server.signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(parts)
    server.process.wait()
    wait_gone([engine], 3)


def test_when_the_engine_is_killed_everybody_is_told(start: Callable[..., ServerProcess]) -> None:
    server = start(**SLOW, limits={"linger_seconds": 1.5})

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=10, trust_env=False) as client:
            body = {"prompt": "ab", "max_tokens": 4000}
            whole = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(3)]
            streams = [asyncio.create_task(client.post(TEXT, json={**body, "stream": True})) for _ in range(3)]
            while (await client.get("/server_info")).json()["stats"]["running"] < 6:
                await asyncio.sleep(0.02)
            os.kill(server.engine_pid(), signal.SIGKILL)
            for response in await asyncio.gather(*whole):
                assert response.status_code == 503 and "SIGKILL" in response.json()["error"]["message"]
                assert response.json()["error"]["code"] == "engine_dead"
            for response in await asyncio.gather(*streams):
                last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
                assert last["error"]["code"] == "engine_dead"
            assert (await client.get("/health")).status_code == 503
            assert (await client.post(TEXT, json=body)).status_code == 503

    asyncio.run(main())
    assert server.wait_exit(8) != 0
    assert "SIGKILL" in server.output.splitlines()[-1] and "Traceback" not in server.output


def test_when_the_engine_freezes_health_says_so_and_nobody_hangs(start: Callable[..., ServerProcess]) -> None:
    server = start(**SLOW, liveness={"silent": 1.5, "dead": 3.0}, limits={"linger_seconds": 0.5})
    engine = server.engine_pid()
    with (
        server.client() as http,
        http.stream("POST", TEXT, json={"prompt": "ab", "max_tokens": 4000, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert http.get("/health").status_code == 200
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        while http.get("/health").status_code == 200:
            assert time.monotonic() - stopped < 3
            time.sleep(0.05)
        last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert time.monotonic() - stopped < 5
    assert server.wait_exit(8) != 0 and gone(engine)


@pytest.mark.parametrize("host", ["a..b", "x" * 300])
def test_what_is_no_host(host: str) -> None:
    from stenograph.errors import ConfigError
    from stenograph.server.launch import bind

    with pytest.raises(ConfigError, match="--host"):
        bind(host, 0)


def test_a_port_in_use_is_told_in_one_line_before_anything_loads(start: Callable[..., ServerProcess]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(wait=False, settings={"port": port})
        assert server.wait_exit(20) != 0
    (line,) = [line for line in server.output.splitlines() if line.startswith("error:")]
    assert str(port) in line and "in use" in line and "--port" in line and "Traceback" not in server.output


def test_a_host_that_isnt_ours(start: Callable[..., ServerProcess]) -> None:
    server = start(wait=False, settings={"host": "192.0.2.1"})
    assert server.wait_exit(20) != 0 and "error: " in server.output and "Traceback" not in server.output


def test_what_it_prints_works(start: Callable[..., ServerProcess]) -> None:
    """The curl line and the Python lines, run as they are."""
    import subprocess

    server = start(settings={"context_length": 128})
    assert server.url.startswith("http://127.0.0.1:")
    time.sleep(0.1)  # the banner's other lines
    lines = server.output.splitlines()
    curl = next(i for i, line in enumerate(lines) if line.strip().startswith("curl"))
    command = lines[curl].strip().removesuffix("\\") + lines[curl + 1].strip()
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    assert '"finish_reason":"length"' in answer.stdout, answer
    first = next(i for i, line in enumerate(lines) if "from openai import" in line)
    code = "\n".join(line[2:] for line in lines[first:] if line.startswith("  "))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert "a😀b中" in said.stdout, said


@pytest.mark.parametrize("words", ["unable to perform operation on <TCPTransport>; the handler is closed", "other"])
def test_a_client_that_left_between_two_writes_is_no_failure(words: str) -> None:
    from stenograph.server.app import _RequestIds

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        raise RuntimeError(words)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    sending = _RequestIds(app)({"type": "http", "headers": []}, receive, send)
    if words == "other":
        with pytest.raises(RuntimeError):
            asyncio.run(sending)
    else:
        asyncio.run(sending)
