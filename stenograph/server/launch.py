"""Starts and ends the server: port, engine process, HTTP loop, signals.

Life: bind the port (so that a taken one is told at once) -> start the engine process, which loads the model -> load the
tokenizer meanwhile -> serve -> on SIGTERM or Ctrl-C turn new requests away and let running ones finish, for a limited
time -> end the engine -> return. When the engine dies, running requests get an error, /health says 503 for a moment
and `serve` raises, for whatever runs the server to start it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from stenograph.engine.client import AsyncEngineClient, Liveness
from stenograph.engine.process import CoreFactory, load_core
from stenograph.errors import ConfigError, EngineDeadError
from stenograph.server.limits import Limits

if TYPE_CHECKING:
    from stenograph.loading.source import ModelSource
    from stenograph.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def serve(
    resolved: Any,
    *,
    source: ModelSource | None = None,
    limits: Limits | None = None,
    liveness: Liveness | None = None,
    make_core: CoreFactory = load_core,
) -> None:
    """Serves until it is told to stop. Raises `StenographError` where it can't start, `EngineDeadError` when the
    engine died.

    `source` saves opening the checkpoint a second time in this process.
    """
    logging.basicConfig(
        level=resolved.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("uvicorn", "uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    listener = bind(resolved.host, resolved.port)
    client = AsyncEngineClient.start(resolved, make_core=make_core, liveness=liveness)
    try:
        tokenizer = _load_tokenizer(resolved, source)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_run(client, resolved, tokenizer, listener, limits or Limits()))
    finally:
        listener.close()
        client.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; who connects while the model loads waits. Raises `ConfigError` for a port in use.

    Only listening settles whose the port is: two sockets with SO_REUSEADDR can be bound to it until one listens.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no host name"
        raise ConfigError(f"host {host[:80]} (--host) is unknown: {reason}.") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise ConfigError(f"port {port} needs more rights.", remedy="Choose one above 1023 with --port.") from None
        raise ConfigError(
            f"port {port} on {host} can't be used: {error.strerror or error}.", remedy="Choose another one with --port."
        ) from None
    return listener


def _load_tokenizer(resolved: Any, source: ModelSource | None) -> Tokenizer | None:
    from stenograph.loading.source import open_model
    from stenograph.tokenizer.tokenizer import load_tokenizer

    if source is None:
        source = open_model(
            resolved.model, load_format=resolved.load_format, trust_remote_code=resolved.trust_remote_code
        )
    return load_tokenizer(source, resolved)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """Signals are `_Signals`' business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """SIGTERM and SIGINT, from the first moment on: `stop` is set by the first, a second one ends the process."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: Any) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self.stop.set)


async def _run(
    client: AsyncEngineClient, resolved: Any, tokenizer: Tokenizer | None, listener: socket.socket, limits: Limits
) -> None:
    from stenograph.server.app import Api, build_app

    signals = _Signals()
    stopped = asyncio.create_task(signals.stop.wait())
    connecting = asyncio.create_task(client.connect(tokenizer))
    api = Api(client, resolved, tokenizer, limits=limits)
    app = build_app(api)
    await asyncio.wait((stopped, connecting), return_when=asyncio.FIRST_COMPLETED)
    if not connecting.done():
        connecting.cancel()
        log.info("Told to stop while loading")
        return
    await connecting
    died = asyncio.Event()
    client.on_death = lambda reason: died.set()
    if client.dead:  # in the moment between
        died.set()
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=10,
            h11_max_incomplete_event_size=64 * 1024,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    _greet(api, listener)
    dead = asyncio.create_task(died.wait())
    await asyncio.wait((stopped, dead, serving), return_when=asyncio.FIRST_COMPLETED)
    if not client.dead:
        await _drain(api)
    if client.dead:
        await asyncio.sleep(limits.linger_seconds)
    server.should_exit = True
    await serving
    if client.dead:
        raise EngineDeadError(client.problem() or "The engine died.")


async def _drain(api: Any) -> None:
    """Running answers finish, for a limited time; new requests are turned away."""
    from stenograph.server.errors import Unavailable

    api.draining = True
    if api.open_requests:
        log.info("Shutting down: %d requests are still running", api.open_requests)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + api.limits.drain_seconds
    while api.open_requests and loop.time() < deadline and not api.client.dead:
        await asyncio.sleep(0.02)
    if api.open_requests and not api.client.dead:
        log.warning("%d requests were still running after %g seconds", api.open_requests, api.limits.drain_seconds)
        api.client.fail_all(
            Unavailable("The server was shut down before the answer was complete.", status=503, code="shutting_down",
                        retry_after=api.limits.retry_after)
        )  # fmt: skip


def _greet(api: Any, listener: socket.socket) -> None:
    """Tells where the server is and how to use it; both ways work as they are printed."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{host}:{port}"
    if api.tokenizer is not None and api.tokenizer.chat_template is not None:
        path = "chat/completions"
        data = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
        messages = '[{"role": "user", "content": "What is the capital of France?"}]'
        call = f'client.chat.completions.create(model="{api.model}", messages={messages}, temperature=0)'
        shown = "answer.choices[0].message.content"
    else:
        path = "completions"
        prompt = '"The capital of France is"' if api.tokenizer is not None else "[1, 2, 3]"
        data = f'{{"prompt": {prompt}, "temperature": 0}}'
        call = f'client.completions.create(model="{api.model}", prompt={prompt}, temperature=0)'
        shown = "answer.choices[0].text"
    print(
        f"""
{api.model} is served at {url}

  curl {url}/v1/{path} -H 'Content-Type: application/json' \\
    -d '{data}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  answer = {call}
  print({shown})
""",
        flush=True,
    )
