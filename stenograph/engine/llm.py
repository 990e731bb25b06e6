"""The offline API: a model in this process, prompts in, answers out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stenograph.config.options import EngineOptions
from stenograph.config.resolve import Resolved
from stenograph.config.sources import gather
from stenograph.engine.core import EngineCore
from stenograph.engine.processors import InputProcessor, OutputProcessor, merge
from stenograph.engine.startup import prepare
from stenograph.engine.types import RequestOutput
from stenograph.errors import RequestError
from stenograph.sampling.params import SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """
    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    Keyword arguments are the options of `docs/settings.md`; an unknown one raises `ConfigError` with the nearest name.
    As everywhere, STENOGRAPH_* variables and a settings file go before them.
    """

    def __init__(self, model: str | None = None, *, progress: bool = True, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        self._start(gather({}, python=options), progress)

    @classmethod
    def from_options(cls, options: EngineOptions, *, progress: bool = True) -> LLM:
        """From options that have been gathered already."""
        llm = cls.__new__(cls)
        llm._start(options, progress)
        return llm

    def _start(self, options: EngineOptions, progress: bool) -> None:
        ready = prepare(options)
        self.resolved: Resolved = ready.resolved
        self.tokenizer = ready.tokenizer
        self.core = EngineCore(ready.resolved, ready.source, progress=progress)
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.core.facts.vocab_size,
            context_length=self.core.context_length,
            max_request_tokens=self.core.max_request_tokens,
        )
        self.outputs = OutputProcessor(self.tokenizer)
        self._ids = itertools.count()
        self._news: dict[str, list[RequestOutput]] = {}  # what has come for each request and wasn't read yet

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One answer a prompt, in their order. A prompt is text or token ids; a single one may stand alone."""
        many = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(many)
        else:
            each = list(params) if isinstance(params, Iterable) else [params]
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts, but {len(each)} sampling parameters.", param="params")
        if not all(isinstance(one, SamplingParams) for one in each):
            raise RequestError("params holds something that is not SamplingParams.", param="params")
        ids: list[str] = []
        try:
            for prompt, one in zip(many, each, strict=True):
                ids.append(self._submit(prompt, one))
            for request_id in ids:
                while not (self._news[request_id] and self._news[request_id][-1].finished):
                    self._step()
            return [merge(self._news[request_id]) for request_id in ids]
        finally:
            self._drop(ids)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, from one conversation or several, through the model's chat template."""
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"{messages!r:.80} is no list of messages.", param="messages")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self._render(m, **template_kwargs) for m in conversations], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The answer as it comes: each item carries what is new (see `OutputProcessor`). Several streams, and
        `generate` meanwhile, may run side by side in one thread."""
        request_id = self._submit(prompt, params or SamplingParams())
        try:
            finished = False
            while not finished:
                while not self._news[request_id]:
                    self._step()
                delta = self._news[request_id].pop(0)
                finished = delta.finished
                yield delta
        finally:
            self._drop([request_id])

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **template_kwargs: Any
    ) -> Iterator[RequestOutput]:
        return self.stream(self._render(messages, **template_kwargs), params)

    def shutdown(self) -> None:
        self.core.shutdown()

    # -- inner workings

    def _render(self, messages: Any, **kwargs: Any) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("This model has no tokenizer, so it has no chat.", param="messages")
        return self.tokenizer.apply_chat_template(messages, **kwargs)

    def _submit(self, prompt: Prompt, params: SamplingParams) -> str:
        request_id = f"offline-{next(self._ids)}"
        requests = self.inputs.build(request_id, prompt, params)
        self.outputs.add(request_id, prompt if isinstance(prompt, str) else None, requests)
        self._news[request_id] = []
        try:
            for request in requests:
                self.core.add_request(request)
        except Exception:
            self._drop([request_id])
            raise
        return request_id

    def _step(self) -> None:
        deltas, aborts = self.outputs.process(self.core.step())
        self.core.abort(aborts)
        for delta in deltas:
            self._news[delta.request_id].append(delta)

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.core.abort(self.outputs.drop(request_id))
            self._news.pop(request_id, None)


def _as_prompts(prompts: Any) -> list[Prompt]:
    """Raises `RequestError` for what is neither a prompt nor several."""
    if isinstance(prompts, str):
        return [prompts]
    many = _as_list(prompts)
    if many and all(isinstance(p, int) for p in many):
        return [many]
    return [p if isinstance(p, str) else _as_list(p) for p in many]


def _as_list(value: Any) -> list[Any]:
    """Also of an array or a tensor, whose numbers become Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise RequestError(
            f"{value!r:.80} is no prompt.", param="prompt", remedy="Give a text, or a list of token ids."
        )
    return [item.tolist() if hasattr(item, "tolist") else item for item in value]
