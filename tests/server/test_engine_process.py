"""The boundary between the front end and the engine process, with a core that only echoes."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from stenograph.engine.client import AnswerStream, AsyncEngineClient, Liveness
from stenograph.errors import EngineDeadError, RequestError, StenographError
from stenograph.sampling.params import SamplingParams
from tests.server.fake_core import make_broken_core, make_echo_core, make_slow_core


@asynccontextmanager
async def engine(
    *, step_seconds: float = 0.0, make_core: Any = make_echo_core, liveness: Liveness | None = None
) -> AsyncIterator[AsyncEngineClient]:
    settings = SimpleNamespace(step_seconds=step_seconds, log_level="error")
    client = AsyncEngineClient.start(settings, make_core=make_core, liveness=liveness)
    try:
        await client.connect(None)
        yield client
    finally:
        client.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(limited())


def submit(client: AsyncEngineClient, *prompts: list[int], max_tokens: int = 8, n: int = 1) -> AnswerStream:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return client.submit([client.build(prompt, params) for prompt in prompts])


async def read(stream: AnswerStream) -> dict[tuple[int, int], list[int]]:
    """Tokens by (prompt, sequence)."""
    found: dict[tuple[int, int], list[int]] = {}
    while news := await stream.next():
        for index, delta in news:
            for part in delta.outputs:
                found.setdefault((index, part.index), []).extend(part.token_ids)
    return found


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_prompts_sequences_and_streams_dont_mix() -> None:
    async def test() -> None:
        async with engine() as client:
            streams = [submit(client, [10 + i, 40 + i], [90 + i], max_tokens=50 + i, n=2) for i in range(20)]
            for i, found in enumerate(await asyncio.gather(*map(read, streams))):
                pair = ([10 + i, 40 + i] * 50)[: 50 + i]
                assert found == {(0, 0): pair, (0, 1): pair, (1, 0): [90 + i] * (50 + i), (1, 1): [90 + i] * (50 + i)}
            assert client.open_sequences == 0 and not client._prompts and not client._sequences

    run(test)


def test_closing_a_stream_aborts_at_once() -> None:
    async def test() -> None:
        async with engine(step_seconds=0.01) as client:
            stream = submit(client, [5], [6], max_tokens=500, n=3)
            await stream.next()
            assert client.open_sequences == 6
            await until(lambda: client.stats.free_pages == 94)
            stream.close()
            stream.close()
            assert client.open_sequences == 0
            await until(lambda: client.stats.free_pages == 100)
            assert await read(submit(client, [7], max_tokens=3)) == {(0, 0): [7, 7, 7]}

    run(test)


def test_a_refused_prompt_is_an_error_of_the_request_and_frees_its_companions() -> None:
    async def test() -> None:
        async with engine(step_seconds=0.01) as client:
            stream = submit(client, [5], [2], max_tokens=400)
            with pytest.raises(RequestError, match="core refuses") as caught:
                await read(stream)
            assert (caught.value.param, caught.value.code, caught.value.status) == ("prompt", "refused", 400)
            await until(lambda: client.stats.free_pages == 100)

    run(test)


def test_a_defect_in_handing_out_fails_the_step_and_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with engine() as client:
            assert client._outputs is not None

            def broken(outputs: Any) -> Any:
                raise ZeroDivisionError

            with monkeypatch.context() as patch:
                patch.setattr(client._outputs, "process", broken)
                with pytest.raises(StenographError, match="handed out"):
                    await read(submit(client, [5], n=2))
            assert client.open_sequences == 0
            assert await read(submit(client, [7], max_tokens=3)) == {(0, 0): [7, 7, 7]}
            await until(lambda: client.stats.free_pages == 100)

    run(test)


def test_sockets_are_private_and_removed() -> None:
    async def test() -> None:
        async with engine() as client:
            directory = client._directory
            assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        assert not os.path.exists(directory) and gone(client.process.pid)

    run(test)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_engine_fails_running_requests_at_once(number: signal.Signals) -> None:
    async def test() -> None:
        async with engine(step_seconds=0.01) as client:
            reasons: list[str] = []
            client.on_death = reasons.append
            streams = [submit(client, [5], max_tokens=500) for _ in range(3)]
            await streams[0].next()
            os.kill(client.process.pid, number)
            started = time.monotonic()
            for stream in streams:
                with pytest.raises(EngineDeadError, match=number.name):
                    await read(stream)
            assert time.monotonic() - started < 2
            assert client.dead and number.name in (client.problem() or "") and len(reasons) == 1
            with pytest.raises(EngineDeadError):
                submit(client, [5])

    run(test)


def test_a_frozen_engine_is_unhealthy_and_then_ended() -> None:
    async def test() -> None:
        patience = Liveness(silent=1.5, dead=3.0, watch_every=0.1)
        async with engine(step_seconds=0.01, liveness=patience) as client:
            stream = submit(client, [5], max_tokens=500)
            await stream.next()
            assert client.problem() is None
            os.kill(client.process.pid, signal.SIGSTOP)
            await until(lambda: client.problem() is not None, 3)
            assert "not been heard of" in (client.problem() or "") and not client.dead
            with pytest.raises(EngineDeadError, match="did not answer"):
                await read(stream)
            await until(lambda: gone(client.process.pid))

    run(test)


def test_a_step_that_never_ends_is_noticed_although_the_process_lives() -> None:
    async def test() -> None:
        async with engine(liveness=Liveness(stuck_step=1.0, watch_every=0.1)) as client:
            stream = submit(client, [1])
            await until(lambda: client.problem() is not None)
            assert "one step" in (client.problem() or "")
            with pytest.raises(EngineDeadError, match="hung in one step"):
                await read(stream)

    run(test)


def test_a_defect_in_the_core_ends_the_engine_with_a_reason_and_no_secret() -> None:
    async def test() -> None:
        async with engine() as client:
            with pytest.raises(EngineDeadError, match="RuntimeError") as caught:
                await read(submit(client, [0]))
            assert "secret" not in str(caught.value)

    run(test)


def test_an_engine_that_cannot_start_says_why() -> None:
    async def test() -> None:
        with pytest.raises(StenographError, match=r"weights are damaged. Download them again"):
            async with engine(make_core=make_broken_core):
                pass

    run(test)


def test_closing_while_it_loads_doesnt_wait() -> None:
    client = AsyncEngineClient.start(SimpleNamespace(step_seconds=0, log_level="error"), make_core=make_slow_core)
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 2 and gone(client.process.pid)


def test_a_ctrl_c_or_sigterm_to_the_whole_group_doesnt_cut_answers() -> None:
    async def test() -> None:
        async with engine(step_seconds=0.01) as client:
            stream = submit(client, [5], max_tokens=20)
            await stream.next()
            os.kill(client.process.pid, signal.SIGINT)
            os.kill(client.process.pid, signal.SIGTERM)
            await read(stream)
            assert not client.dead

    run(test)
