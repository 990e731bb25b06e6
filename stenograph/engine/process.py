"""The engine process: an `EngineCore` that takes requests from a socket and sends each step's outputs in a message."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from stenograph.engine.messages import Abort, Add, Beat, Failed, Outputs, Ready, Refused, Stop, ToEngine
from stenograph.engine.types import EngineOutput
from stenograph.errors import RequestError, StenographError

if TYPE_CHECKING:
    from stenograph.config.resolve import Resolved

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
IDLE_POLL_MS = 1000
ORPHAN_CHECK_SECONDS = 0.5

CoreFactory = Callable[[Any], Any]


def to_engine_address(directory: str) -> str:
    return f"ipc://{directory}/in"


def from_engine_address(directory: str) -> str:
    return f"ipc://{directory}/out"


def load_core(resolved: Resolved) -> Any:
    """The real engine core. Imports torch, so only the engine process calls it."""
    from stenograph.engine.core import EngineCore
    from stenograph.loading.source import open_model

    source = open_model(resolved.model, load_format=resolved.load_format, trust_remote_code=resolved.trust_remote_code)
    return EngineCore(resolved, source)


def run_engine_process(resolved: Any, directory: str, parent: int, make_core: CoreFactory = load_core) -> None:
    """Entry point of the spawned process. `directory` holds the sockets; `parent` is the front end's process id."""
    # The front end decides when to leave: a Ctrl-C, or a SIGTERM to the whole group, must not cut running answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    _configure_logging(resolved)
    context = zmq.Context()
    pulse = _Pulse(context, directory, parent)
    pulse.start()
    incoming = context.socket(zmq.PULL)
    incoming.setsockopt(zmq.RCVHWM, 0)
    incoming.connect(to_engine_address(directory))
    outgoing = _push_socket(context, directory)
    encode = msgspec.msgpack.Encoder().encode
    code = 0
    try:
        core = make_core(resolved)
        ready = Ready(core.facts.vocab_size, core.context_length, core.max_request_tokens, core.stats())
        outgoing.send(encode(ready))
        _serve(core, incoming, outgoing, encode, pulse)
        core.shutdown()
    except StenographError as error:
        outgoing.send(encode(Failed(str(error))))
        code = 1
    except Exception as error:
        log.exception("The engine failed")
        outgoing.send(encode(Failed(f"The engine failed: {type(error).__name__}. The log has the details.")))
        code = 1
    pulse.leave()
    incoming.close(linger=0)
    outgoing.close(linger=1000)
    context.term()
    sys.stderr.flush()
    if code:
        os._exit(code)  # whatever is broken must not hold the process up


def _serve(core: Any, incoming: zmq.Socket[bytes], outgoing: zmq.Socket[bytes], encode: Any, pulse: _Pulse) -> None:
    decode = msgspec.msgpack.Decoder(ToEngine).decode
    while True:
        changed = False
        if not core.has_work():
            incoming.poll(IDLE_POLL_MS)
        while (frame := _receive(incoming)) is not None:
            message = decode(frame)
            changed = True
            if isinstance(message, Add):
                for request in message.requests:
                    try:
                        core.add_request(request)
                    except RequestError as error:
                        refused = Refused(request.request_id, str(error), error.param, error.code, error.status)
                        outgoing.send(encode(refused))
            elif isinstance(message, Abort):
                core.abort(message.request_ids)
            elif isinstance(message, Stop):
                return
        outputs: list[EngineOutput] = []
        if core.has_work():
            pulse.step_started = time.monotonic()
            outputs = core.step()
            pulse.step_started = None
        if outputs or changed:
            outgoing.send(encode(Outputs(outputs, core.stats())))


def _receive(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _push_socket(context: zmq.Context[Any], directory: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(from_engine_address(directory))
    return socket


class _Pulse(threading.Thread):
    """Tells the front end that this process is alive, and ends the process when the front end is gone."""

    def __init__(self, context: zmq.Context[Any], directory: str, parent: int) -> None:
        super().__init__(daemon=True, name="stenograph-pulse")
        self.step_started: float | None = None
        self._context, self._directory, self._parent = context, directory, parent
        self._leaving = threading.Event()

    def leave(self) -> None:
        self._leaving.set()
        self.join()

    def run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        socket = _push_socket(self._context, self._directory)
        next_beat = 0.0
        while not self._leaving.wait(ORPHAN_CHECK_SECONDS if next_beat else 0):
            if os.getppid() != self._parent:  # killed hard: nobody will ever read another token
                shutil.rmtree(self._directory, ignore_errors=True)
                os._exit(1)
            now = time.monotonic()
            if now >= next_beat:
                started = self.step_started
                socket.send(encode(Beat(0.0 if started is None else now - started)))
                next_beat = now + BEAT_SECONDS
        socket.close(linger=0)


def _configure_logging(resolved: Any) -> None:
    level = str(getattr(resolved, "log_level", "info")).upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
