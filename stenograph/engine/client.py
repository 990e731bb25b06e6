"""The front end's side of the engine process: starts it, sends it requests, hands its tokens out as text, watches it.

Everything here runs on one asyncio event loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq

from stenograph.engine.messages import Abort, Add, Beat, Failed, FromEngine, Outputs, Ready, Refused, Stop
from stenograph.engine.process import (
    CoreFactory,
    from_engine_address,
    load_core,
    run_engine_process,
    to_engine_address,
)
from stenograph.engine.processors import InputProcessor, OutputProcessor
from stenograph.engine.types import EngineOutput, EngineRequest, EngineStats, RequestOutput
from stenograph.errors import EngineDeadError, RequestError, StenographError
from stenograph.sampling.params import SamplingParams
from stenograph.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Seconds after which an engine that sends nothing counts as unhealthy, then as dead (it is killed and its
    requests end with an error); `stuck_step` likewise for one step that never ends."""

    silent: float = 5.0
    dead: float = 30.0
    stuck_step: float = 300.0
    watch_every: float = 0.5


class Observer(Protocol):
    """Is told what happens to sequences, for metrics."""

    def arrived(self, prompt_tokens: int, sequences: int) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def next_tokens(self, seconds: float, count: int) -> None: ...
    def finished(self, reason: str, seconds: float, tokens: int) -> None: ...


@dataclass(slots=True)
class _Clock:
    """When one sequence's tokens came."""

    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class _Prompt:
    stream: AnswerStream
    index: int
    clocks: dict[int, _Clock] = field(default_factory=dict)


class AnswerStream:
    """What the engine makes of one or several prompts that were submitted together.

    `next()` waits for news and returns all there is: pairs of (index of the prompt, delta); after the last one it
    returns []. It raises `EngineDeadError` when the engine dies, `RequestError` where the engine refuses a prompt, and
    what `fail` was given. `close()` must follow: it aborts what is still running.
    """

    def __init__(self, client: AsyncEngineClient, request_ids: list[str]) -> None:
        self.started = time.monotonic()
        self._client = client
        self._unfinished = dict.fromkeys(request_ids)
        self._news: list[tuple[int, RequestOutput]] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[tuple[int, RequestOutput]]:
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, []
        return news

    def fail(self, error: BaseException) -> None:
        """Ends the stream: once its news are read, `next` raises `error`."""
        if self._error is None and self._unfinished:
            self._error = error
            self._abort()
            self._wake()

    def close(self) -> None:
        self._abort()

    def _abort(self) -> None:
        if self._unfinished:
            ids, self._unfinished = list(self._unfinished), {}
            self._client._forget(ids)

    def _put(self, index: int, delta: RequestOutput) -> None:
        self._news.append((index, delta))
        if delta.finished:
            self._unfinished.pop(delta.request_id, None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngineClient:
    """Owns the engine process.

    >>> client = AsyncEngineClient.start(resolved)      # returns at once; the model loads meanwhile
    >>> await client.connect(tokenizer)                 # until it is ready; raises StenographError where it can't start
    >>> stream = client.submit([client.build(ids, params)])
    """

    def __init__(self, process: Any, directory: str, *, liveness: Liveness | None = None) -> None:
        self.process = process
        self.liveness = liveness or Liveness()
        self.observer: Observer | None = None
        self.on_death: Callable[[str], None] | None = None
        self.stats = EngineStats()
        self.inputs: InputProcessor | None = None
        self.open_sequences = 0
        self._directory = directory
        self._context = zmq.Context()
        self._outgoing = self._context.socket(zmq.PUSH)
        self._outgoing.setsockopt(zmq.SNDHWM, 0)
        self._outgoing.bind(to_engine_address(directory))
        self._incoming = self._context.socket(zmq.PULL)
        self._incoming.setsockopt(zmq.RCVHWM, 0)
        self._incoming.bind(from_engine_address(directory))
        self._descriptor = int(self._incoming.getsockopt(zmq.FD))
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._ids = itertools.count()
        self._prompts: dict[str, _Prompt] = {}
        self._sequences: dict[str, int] = {}  # prompt's request id -> its sequences
        self._outputs: OutputProcessor | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._death: str | None = None
        self._heard = time.monotonic()
        self._busy_seconds = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def start(
        cls, resolved: Any, *, make_core: CoreFactory = load_core, liveness: Liveness | None = None
    ) -> AsyncEngineClient:
        """Starts the engine process. Needs no event loop, so that loading overlaps with the front end's own start."""
        directory = tempfile.mkdtemp(prefix="stenograph-")  # mode 0700: nobody else can connect
        process = multiprocessing.get_context("spawn").Process(
            target=run_engine_process,
            args=(resolved, directory, os.getpid(), make_core),
            name="stenograph-engine",
            daemon=False,  # daemonic processes may have no children, and tensor parallelism needs them
        )
        client = cls(process, directory, liveness=liveness)
        process.start()
        return client

    async def connect(self, tokenizer: Tokenizer | None) -> Ready:
        """Waits until the engine is ready."""
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._outputs = OutputProcessor(tokenizer)
        self._heard = time.monotonic()
        self._loop.add_reader(self._descriptor, self._on_readable)
        self._loop.add_reader(self.process.sentinel, self._on_exit)
        self._on_watch()
        ready = await self._ready
        self.stats = ready.stats
        self.inputs = InputProcessor(
            tokenizer,
            vocab_size=ready.vocab_size,
            context_length=ready.context_length,
            max_request_tokens=ready.max_request_tokens,
        )
        return ready

    # -- health

    @property
    def dead(self) -> bool:
        return self._death is not None

    def problem(self) -> str | None:
        """Why the engine can't be trusted to answer now, or None."""
        if self._death is not None:
            return self._death
        silent = time.monotonic() - self._heard
        if silent > self.liveness.silent:
            return f"The engine has not been heard of for {silent:.0f} seconds."
        if self._busy_seconds > self.liveness.stuck_step:
            return f"The engine has been in one step for {self._busy_seconds:.0f} seconds."
        return None

    # -- requests

    def build(self, prompt: Sequence[int], params: SamplingParams) -> list[EngineRequest]:
        """Checks one prompt; nothing runs yet. Raises `RequestError`."""
        assert self.inputs is not None
        return self.inputs.build(format(next(self._ids), "x"), prompt, params)

    def submit(self, prompts: Sequence[list[EngineRequest]]) -> AnswerStream:
        """Runs prompts from `build`. Raises `EngineDeadError`."""
        assert self._outputs is not None
        if self._death is not None:
            raise EngineDeadError(self._death)
        ids = [requests[0].request_id.partition("#")[0] for requests in prompts]
        stream = AnswerStream(self, ids)
        for index, (request_id, requests) in enumerate(zip(ids, prompts, strict=True)):
            self._prompts[request_id] = _Prompt(stream, index)
            self._sequences[request_id] = len(requests)
            self.open_sequences += len(requests)
            self._outputs.add(request_id, None, requests)
            if self.observer is not None:
                self.observer.arrived(len(requests[0].prompt_token_ids), len(requests))
        try:
            self._send(Add([request for requests in prompts for request in requests]))
        except Exception:
            stream.close()
            raise
        return stream

    def _forget(self, request_ids: list[str]) -> None:
        """Aborts prompts' sequences and frees what is kept for them here."""
        assert self._outputs is not None
        aborts: list[str] = []
        for request_id in request_ids:
            prompt = self._prompts.pop(request_id, None)
            if prompt is None:
                continue
            self.open_sequences -= self._sequences.pop(request_id)
            engine_ids = self._outputs.drop(request_id)
            aborts += engine_ids
            if self.observer is not None:
                now = time.monotonic()
                for _ in engine_ids:
                    self.observer.finished("abort", now - prompt.stream.started, 0)
        if aborts and self._death is None:
            self._send(Abort(aborts))

    def _send(self, message: Any) -> None:
        self._outgoing.send(self._encode(message), zmq.NOBLOCK)

    # -- news from the engine

    def _on_readable(self) -> None:
        # The descriptor signals edges, not levels: read until there is nothing left.
        woken: dict[AnswerStream, None] = {}
        while True:
            try:
                frame = self._incoming.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._heard = time.monotonic()
            message = self._decode(frame)
            if isinstance(message, Outputs):
                self.stats = message.stats
                self._busy_seconds = 0.0
                try:
                    self._deliver(message.outputs, woken)
                except Exception:  # a defect of ours must not leave anybody waiting for ever
                    log.exception("Handling a step's outputs failed; its requests end with an error")
                    self._give_up(message.outputs)
            elif isinstance(message, Beat):
                self._busy_seconds = message.busy_seconds
            elif isinstance(message, Refused):
                self._refuse(message)
            elif isinstance(message, Ready):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            elif isinstance(message, Failed):
                self._die(message.message)
        for stream in woken:
            stream._wake()

    def _deliver(self, outputs: list[EngineOutput], woken: dict[AnswerStream, None]) -> None:
        assert self._outputs is not None
        deltas, aborts = self._outputs.process(outputs)
        if aborts:
            self._send(Abort(aborts))
        now = self._heard
        for delta in deltas:
            prompt = self._prompts.get(delta.request_id)
            if prompt is None:
                continue
            if self.observer is not None:
                self._observe(prompt, delta, now)
            if delta.finished:
                del self._prompts[delta.request_id]
                self.open_sequences -= self._sequences.pop(delta.request_id)
            prompt.stream._put(prompt.index, delta)
            woken[prompt.stream] = None

    def _give_up(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            prompt = self._prompts.get(output.request_id.partition("#")[0])
            if prompt is not None:
                prompt.stream.fail(StenographError("The answer could not be handed out."))

    def _observe(self, prompt: _Prompt, delta: RequestOutput, now: float) -> None:
        assert self.observer is not None
        for part in delta.outputs:
            clock = prompt.clocks.get(part.index)
            count = len(part.token_ids)
            if clock is None:
                clock = prompt.clocks[part.index] = _Clock()
                if count:
                    self.observer.first_token(now - prompt.stream.started)
            elif count:
                self.observer.next_tokens(now - clock.last, count)
            clock.last = now
            clock.tokens += count
            if part.finish_reason is not None:
                self.observer.finished(part.finish_reason, now - prompt.stream.started, clock.tokens)

    def _refuse(self, message: Refused) -> None:
        prompt = self._prompts.get(message.request_id.partition("#")[0])
        if prompt is not None:
            error = RequestError(message.message, param=message.param, code=message.code, status=message.status)
            prompt.stream.fail(error)

    # -- the end

    def _on_watch(self) -> None:
        assert self._loop is not None
        self._on_readable()
        silent = time.monotonic() - self._heard
        if silent > self.liveness.dead:
            self._die(f"The engine did not answer for {silent:.0f} seconds and was ended.")
        elif self._busy_seconds > 2 * self.liveness.stuck_step:
            self._die(f"The engine hung in one step for {self._busy_seconds:.0f} seconds and was ended.")
        if self._death is None:
            self._watch = self._loop.call_later(self.liveness.watch_every, self._on_watch)

    def _on_exit(self) -> None:
        self._on_readable()  # its last words first
        self.process.join(timeout=1)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        self._die(f"The engine process ended unexpectedly ({how}).")

    def _die(self, reason: str) -> None:
        if self._death is not None:
            return
        self._death = reason
        self._unwatch()
        self._kill()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(StenographError(reason))
        for prompt in list(self._prompts.values()):
            prompt.stream.fail(EngineDeadError(reason))
        if self.on_death is not None:
            self.on_death(reason)

    def fail_all(self, error: BaseException) -> None:
        """Ends every running request with `error`."""
        for prompt in list(self._prompts.values()):
            prompt.stream.fail(error)

    def _unwatch(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(OSError, ValueError):
                self._loop.remove_reader(self.process.sentinel)
            self._loop.remove_reader(self._descriptor)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()  # SIGKILL: it may be stopped, or deep in a step

    def close(self, *, patience: float = 5.0) -> None:
        """Ends the engine process, gently if it listens. Can be called at any time, more than once, without a loop."""
        if self._context.closed:
            return
        if self._death is None:
            self._death = "The engine has been shut down."
            self._unwatch()
            if self.inputs is not None:  # one that still loads wouldn't hear it
                with contextlib.suppress(zmq.ZMQError):
                    self._send(Stop())
                self.process.join(timeout=patience)
        self._kill()
        self.process.join(timeout=patience)
        self._incoming.close(linger=0)
        self._outgoing.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)
