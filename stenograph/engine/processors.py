"""The two halves of a front end: text -> requests for the engine core, and its tokens -> text.

The HTTP server and the offline `LLM` share them; both run outside the engine core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stenograph.engine.types import CompletionOutput, EngineOutput, EngineRequest, RequestOutput
from stenograph.errors import RequestError
from stenograph.sampling.params import SEED_RANGE, SamplingParams, TokenLogprob
from stenograph.tokenizer.detokenizer import Detokenizer
from stenograph.tokenizer.stop_checker import StopChecker
from stenograph.tokenizer.tokenizer import Tokenizer


class InputProcessor:
    """Checks a prompt against the model's limits and makes one `EngineRequest` for each of its n sequences.

    vocab_size          of the model
    context_length      tokens, prompt and answer together
    max_request_tokens  likewise, what the KV cache can hold for one request; at most context_length
    tokenizer           None where the model has none: prompts must then be token ids
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, context_length: int, max_request_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size, self.context_length = vocab_size, context_length
        self.max_request_tokens = max_request_tokens

    def build(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams) -> list[EngineRequest]:
        """Raises `RequestError` for an empty or over-long prompt, or an id outside the vocabulary."""
        ids = self.encode(prompt)
        params.check_against(vocab_size=self.vocab_size)
        room = self.context_length - len(ids)
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise RequestError(
                f"The prompt has {len(ids)} tokens; the context length is {self.context_length}.",
                param="prompt",
                code="context_length_exceeded",
                remedy="Shorten the prompt.",
            )
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = self.max_request_tokens - len(ids)
            if max_tokens < 1:
                raise RequestError(
                    f"The prompt has {len(ids)} tokens; the KV cache holds {self.max_request_tokens} for one request.",
                    param="prompt",
                    code="context_length_exceeded",
                    remedy="Shorten the prompt, or start the server with more KV memory.",
                )
        elif max_tokens > room:
            raise RequestError(
                f"The prompt has {len(ids)} tokens and max_tokens is {max_tokens}: together {len(ids) + max_tokens}, "
                f"but the context length is {self.context_length}.",
                param="max_tokens",
                code="context_length_exceeded",
                remedy=f"Lower max_tokens to at most {room}, or shorten the prompt.",
            )
        elif len(ids) + max_tokens > self.max_request_tokens:
            raise RequestError(
                f"The prompt has {len(ids)} tokens and max_tokens is {max_tokens}: together {len(ids) + max_tokens}, "
                f"but the KV cache holds {self.max_request_tokens} for one request.",
                param="max_tokens",
                code="context_length_exceeded",
                remedy="Shorten the prompt or lower max_tokens, or start the server with more KV memory.",
            )
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}; at most {max_tokens} tokens can be generated here.",
                param="min_tokens",
            )
        one = params.replace(n=1, max_tokens=max_tokens)
        if params.n == 1:
            return [EngineRequest(request_id=request_id, prompt_token_ids=ids, sampling=one)]
        return [
            EngineRequest(
                request_id=f"{request_id}#{i}",
                prompt_token_ids=ids,
                sampling=one if params.seed is None else one.replace(seed=_nth_seed(params.seed, i)),
            )
            for i in range(params.n)
        ]

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt. Raises `RequestError`."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("This model has no tokenizer.", param="prompt", remedy="Send token ids.")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                    raise RequestError(
                        f"The prompt holds {token!r}, not a token id from 0 to {self.vocab_size - 1}.", param="prompt"
                    )
        if not ids:
            raise RequestError("The prompt is empty.", param="prompt", remedy="Send at least one token.")
        return ids


def _nth_seed(seed: int, index: int) -> int:
    """Seeds of the n sequences of one seeded request: the first keeps the seed, so n = 1 repeats it."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) % SEED_RANGE


@dataclass(slots=True)
class _Sequence:
    """Text state of one generated sequence."""

    parent: _Prompt
    index: int
    params: SamplingParams
    detokenizer: Detokenizer | None
    stop: StopChecker | None
    num_tokens: int = 0


@dataclass(slots=True)
class _Prompt:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    unfinished: set[str] = field(default_factory=set)


class OutputProcessor:
    """Turns the engine's tokens into text, finds stop strings, and groups the n sequences of a request.

    `process` returns *deltas*: each `CompletionOutput` carries the text, ids and log-probabilities of this step alone,
    and only sequences with something new appear. `RequestOutput.finished` is true on the last one.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._sequences: dict[str, _Sequence] = {}  # by engine request id
        self._prompts: dict[str, _Prompt] = {}  # by request id, until all of its sequences have finished

    def add(self, request_id: str, prompt: str | None, requests: Sequence[EngineRequest]) -> None:
        parent = self._prompts[request_id] = _Prompt(request_id, prompt, requests[0].prompt_token_ids)
        for index, request in enumerate(requests):
            params = request.sampling
            detokenizer = None
            if self.tokenizer is not None:
                detokenizer = Detokenizer(self.tokenizer, request.prompt_token_ids, params.skip_special_tokens)
            stop = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
            self._sequences[request.request_id] = _Sequence(parent, index, params, detokenizer, stop)
            parent.unfinished.add(request.request_id)

    def drop(self, request_id: str) -> list[str]:
        """Forgets a request (its client is gone); returns the engine request ids to abort."""
        prompt = self._prompts.pop(request_id, None)
        ids = [] if prompt is None else list(prompt.unfinished)
        for engine_id in ids:
            del self._sequences[engine_id]
        return ids

    def process(self, outputs: Sequence[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
        """(deltas, engine request ids to abort because a stop string ended them)."""
        deltas: dict[str, RequestOutput] = {}
        aborts: list[str] = []
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:  # ended by a stop string or dropped; the engine hadn't heard of it yet
                continue
            completion = self._advance(sequence, output)
            parent = sequence.parent
            delta = deltas.get(parent.request_id)
            if delta is None:
                delta = deltas[parent.request_id] = RequestOutput(
                    request_id=parent.request_id,
                    prompt=parent.prompt,
                    prompt_token_ids=parent.prompt_token_ids,
                    outputs=[],
                )
            delta.outputs.append(completion)
            delta.cached_tokens = output.cached_tokens
            delta.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
            delta.error = output.error or delta.error
            if completion.finish_reason is not None:
                del self._sequences[output.request_id]
                parent.unfinished.discard(output.request_id)
                delta.finished = not parent.unfinished
                if delta.finished:
                    del self._prompts[parent.request_id]
                if output.finish_reason is None:
                    aborts.append(output.request_id)
        return list(deltas.values()), aborts

    def _advance(self, sequence: _Sequence, output: EngineOutput) -> CompletionOutput:
        params = sequence.params
        completion = CompletionOutput(
            index=sequence.index,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        sequence.num_tokens += len(output.token_ids)
        if sequence.detokenizer is None:
            return completion
        shown: list[int] = output.token_ids
        if output.finish_reason == "stop" and not params.include_stop_str_in_output:
            shown = shown[:-1]  # the token that ended the answer is no part of its text
        text = sequence.detokenizer.add(shown)
        if output.finish_reason is not None:
            text += sequence.detokenizer.finish()
        if sequence.stop is not None:
            if sequence.num_tokens >= params.min_tokens:
                text, match = sequence.stop.feed(text)
                if match is not None:
                    completion.finish_reason, completion.stop_reason = "stop", match
                elif output.finish_reason is not None:
                    text += sequence.stop.flush()
        completion.text = text
        return completion


def merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Adds up a request's deltas into its whole answer."""
    whole = RequestOutput(
        request_id=outputs[0].request_id,
        prompt=outputs[0].prompt,
        prompt_token_ids=outputs[0].prompt_token_ids,
        outputs=[],
    )
    by_index: dict[int, CompletionOutput] = {}
    for delta in outputs:
        whole.finished |= delta.finished
        whole.error = whole.error or delta.error
        whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
        whole.cached_tokens = max(whole.cached_tokens, delta.cached_tokens)
        for part in delta.outputs:
            answer = by_index.setdefault(part.index, CompletionOutput(index=part.index))
            answer.text += part.text
            answer.token_ids += part.token_ids
            if part.logprobs is not None:
                known: list[TokenLogprob] = answer.logprobs or []
                answer.logprobs = known + part.logprobs
            answer.finish_reason = part.finish_reason or answer.finish_reason
            answer.stop_reason = answer.stop_reason if part.stop_reason is None else part.stop_reason
    whole.outputs = [by_index[i] for i in sorted(by_index)]
    return whole
