"""Servers under test run as a user runs them: in processes of their own, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.chain import save_chain

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A server on a free port; `url` is known once it says so."""

    def __init__(self, **given: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.run_server", json.dumps(given)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        )
        self.said: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)

    @property
    def output(self) -> str:
        return "".join(self.said)

    def wait_ready(self, seconds: float = 60) -> ServerProcess:
        deadline = time.monotonic() + seconds
        while not (found := re.search(r"is served at (http://\S+)", self.output)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.02)
        self.url = found[1]
        return self

    def engine_pid(self) -> int:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and b"spawn_main" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        raise LookupError("the server has no engine process")

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, **more)

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            stats: dict[str, Any] = client.get("/server_info").json()["stats"]
            return stats

    def wait_idle(self, seconds: float = 5.0) -> dict[str, Any]:
        """Waits until nothing runs; every KV page must then be free."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            busy = stats["running"] or stats["waiting"] or stats["open_requests"] or stats["open_sequences"]
            if not busy and stats["free_pages"] == stats["total_pages"]:
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait_exit(self, seconds: float = 15) -> int:
        code = self.process.wait(timeout=seconds)
        self._thread.join(timeout=2)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
                return
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def chain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain(tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="session")
def options(chain_dir: Path) -> dict[str, Any]:
    return {
        "model": str(chain_dir), "served_model_name": "chain", "port": 0, "device": "cpu", "dtype": "float32",
        "threads": 1, "page_size": 16,
        "max_total_tokens": 16384, "max_running_requests": 32, "chunked_prefill_size": 256,
        "log_level": "warning",
    }  # fmt: skip


@pytest.fixture(scope="session")
def server(options: dict[str, Any]) -> Iterator[ServerProcess]:
    """The server that most tests share; every test must leave it idle."""
    server = ServerProcess(options=options).wait_ready()
    yield server
    server.close()
    assert server.process.returncode == 0 and "Traceback" not in server.output, server.output


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
    server.wait_idle()


@pytest.fixture
def start(options: dict[str, Any]) -> Iterator[Callable[..., ServerProcess]]:
    """Starts further servers, for tests that end them."""
    servers: list[ServerProcess] = []

    def start(*, wait: bool = True, settings: dict[str, Any] | None = None, **given: Any) -> ServerProcess:
        server = ServerProcess(options={**options, **(settings or {})}, **given)
        servers.append(server)
        return server.wait_ready() if wait else server

    yield start
    for server in servers:
        server.close()
