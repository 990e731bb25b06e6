"""A core that echoes: each answer repeats its prompt's tokens, one a step. For tests of the process boundary alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from stenograph.engine.types import EngineOutput, EngineRequest, EngineStats
from stenograph.errors import ModelLoadError, RequestError


class EchoCore:
    """`settings.step_seconds` slows it down; token 0 in a prompt makes a step crash, token 1 makes it hang."""

    context_length = max_request_tokens = 8192

    def __init__(self, settings: Any) -> None:
        self.facts = SimpleNamespace(vocab_size=320)
        self.step_seconds: float = settings.step_seconds
        self.running: dict[str, tuple[EngineRequest, int]] = {}

    def add_request(self, request: EngineRequest) -> None:
        if request.prompt_token_ids[0] == 2:
            raise RequestError("A request that the core refuses.", param="prompt", code="refused")
        self.running[request.request_id] = (request, 0)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        return [EngineOutput(request_id=i, finish_reason="abort") for i in request_ids if self.running.pop(i, None)]

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[EngineOutput]:
        time.sleep(self.step_seconds)
        outputs = []
        for request_id, (request, done) in list(self.running.items()):
            prompt = request.prompt_token_ids
            if prompt[0] == 0:
                raise RuntimeError("a secret of the machine")
            if prompt[0] == 1:
                time.sleep(3600)
            output = EngineOutput(request_id=request_id, token_ids=[prompt[done % len(prompt)]])
            if done + 1 == request.sampling.max_tokens:
                output.finish_reason = "length"
                del self.running[request_id]
            else:
                self.running[request_id] = (request, done + 1)
            outputs.append(output)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running), free_pages=100 - len(self.running), total_pages=100)

    def shutdown(self) -> None:
        self.running.clear()


def make_echo_core(settings: Any) -> EchoCore:
    return EchoCore(settings)


def make_broken_core(settings: Any) -> EchoCore:
    raise ModelLoadError("The weights are damaged.", remedy="Download them again.")


def make_slow_core(settings: Any) -> EchoCore:
    time.sleep(60)
    return EchoCore(settings)
