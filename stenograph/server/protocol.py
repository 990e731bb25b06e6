"""Requests and responses of the HTTP API in OpenAI's shapes, with this server's extensions.

Requests are pydantic models: strict types (no "0.5" for 0.5), an explicit null is the same as absent, unknown fields
are kept aside and named to the client. Ranges are checked by `SamplingParams`, the one home of that. Responses are
typed dictionaries, encoded as they are.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from stenograph.errors import RequestError
from stenograph.sampling.params import MAX_LOGPROBS, SamplingParams

MAX_TOP_K = 2**31 - 1  # beyond any vocabulary, so it says "all" as well as a larger number does

# -- requests

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}],
}
_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_CHOICE_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}

# Unions are checked by hand: pydantic would try each member on each of a million tokens, and report them all.
Prompt = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
Content = Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)]
Stop = Annotated[Any, WithJsonSchema(_STOP_SCHEMA)]
Choice = Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None


class ResponseFormat(_Body):
    type: str


class GenerationRequest(_Body):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Stop = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    # Taken, and without effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # Extensions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def ignored_fields(self) -> list[str]:
        return list(self.model_extra or ())

    def check_common(self) -> None:
        """Raises `RequestError` for what is understood but not offered."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is for streams alone.", param="stream_options", remedy="Set stream to true."
            )
        if self.response_format is not None and self.response_format.type != "text":
            raise RequestError(
                f"response_format {self.response_format.type!r} isn't offered by this server; text is.",
                param="response_format",
            )

    def common_params(self) -> dict[str, Any]:
        """The given fields that go to `SamplingParams` under their own name."""
        names = (
            "n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p",
            "repetition_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
            "prompt_logprobs",
        )  # fmt: skip
        params = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            params["top_k"] = min(self.top_k, MAX_TOP_K)
        if self.stop is not None:
            params["stop"] = _stops(self.stop)
        if self.stop_token_ids is not None:
            params["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias:
            params["logit_bias"] = {_token_key(key): bias for key, bias in self.logit_bias.items()}
        return params


class CompletionRequest(GenerationRequest):
    prompt: Prompt = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def sampling_params(self) -> SamplingParams:
        """Raises `RequestError`."""
        self.check_common()
        if self.suffix:
            raise RequestError("suffix (filling in the middle) isn't offered by this server.", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of}; this server offers best_of equal to n alone.", param="best_of"
            )
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens is 0; it must be at least 1.",
                param="max_tokens",
                remedy="0 is for echo, which returns the prompt.",
            )
        params = self.common_params()
        if self.max_tokens is not None:
            params["max_tokens"] = self.max_tokens
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                params["prompt_logprobs"] = self.logprobs
        return SamplingParams(**params)


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(GenerationRequest):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None

    def sampling_params(self) -> SamplingParams:
        """Raises `RequestError`."""
        self.check_common()
        params = self.common_params()
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit == 0:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise RequestError(f"{name} is 0; it must be at least 1.", param=name)
        params["max_tokens"] = limit
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; it must be from 0 to {MAX_LOGPROBS}.", param="top_logprobs"
            )
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**params)

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools to show to the model. Raises `RequestError` where a call is demanded."""
        choice = self.tool_choice
        if choice is not None and choice not in ("none", "auto"):
            known = choice == "required" or isinstance(choice, dict)
            raise RequestError(
                "tool_choice demands a tool call, which this server doesn't offer; none and auto are."
                if known
                else "tool_choice must be none or auto.",
                param="tool_choice",
            )
        for index, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            if (
                tool.get("type") != "function"
                or not isinstance(function, dict)
                or not isinstance(function.get("name"), str)
            ):
                raise RequestError(
                    f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}.', param="tools"
                )
        if choice == "auto" and not self.tools:
            raise RequestError("tool_choice is given without tools.", param="tool_choice")
        return self.tools if self.tools and choice != "none" else None


class TokenizeRequest(_Body):
    """Of a text, or of a conversation as chat completions would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})] = None
    skip_special_tokens: bool | None = None


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], data: bytes) -> Body:
    """A request body from its JSON. Raises `RequestError` naming the field, for malformed JSON too."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _request_error(error) from None


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = first["loc"]
    if first["type"] == "json_invalid":
        return RequestError(
            f"The body isn't valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.", code="invalid_json"
        )
    if not path:
        return RequestError("The body must be a JSON object.")
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    what = "it is required" if first["type"] == "missing" else first["msg"].replace("Input should", "it should")
    return RequestError(f"{where}: {what}.", param=str(path[0]))


def _stops(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        return tuple(stop)
    raise RequestError("stop must be a string or a list of strings.", param="stop")


_TOKEN_KEY = re.compile(r"-?[0-9]{1,18}")


def _token_key(key: str) -> int:
    if not _TOKEN_KEY.fullmatch(key):
        raise RequestError(f"logit_bias key {key[:40]!r} is not a token id.", param="logit_bias")
    return int(key)


def prompts_of(prompt: Any, *, limit: int) -> list[str | list[int]]:
    """The prompts of a completions request, from any of the four shapes. Raises `RequestError`."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        what = "is required" if prompt is None else "must be a string, a list of strings, token ids, or a list of them"
        raise RequestError(f"prompt {what}.", param="prompt")
    if not prompt:
        raise RequestError("The prompt is empty.", param="prompt", remedy="Send at least one token.")
    if not isinstance(prompt[0], (str, list)):
        return [prompt]  # token ids, each checked against the vocabulary later
    if len(prompt) > limit:
        raise RequestError(f"The request has {len(prompt)} prompts; at most {limit}.", param="prompt")
    kind = type(prompt[0])
    if not all(isinstance(item, kind) for item in prompt):
        raise RequestError("prompt mixes texts and token ids; it must hold one kind.", param="prompt")
    return prompt


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content a string, tool-call arguments as objects.
    Raises `RequestError`."""
    if not messages:
        raise RequestError("messages is empty.", param="messages", remedy="Send at least one message.")
    return [_plain(message, index) for index, message in enumerate(messages)]


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    plain: dict[str, Any] = {
        # Templates don't know OpenAI's newer name for the system role.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text_of(message.content, index),
    }
    if message.content is None and message.role not in ("assistant", "function"):
        raise RequestError(f"messages[{index}].content is required.", param="messages")
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call, index) for call in message.tool_calls]
    return plain


def _text_of(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"messages[{index}].content must be a string or a list of text parts.", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
        if kind not in (None, "text", "input_text", "refusal") or not isinstance(text, str):
            shown = kind if isinstance(kind, str) else "without a text"
            raise RequestError(
                f"messages[{index}].content holds a part {shown[:40]!r}; this server takes text parts alone.",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"messages[{index}].tool_calls holds a call without a function name.", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    return {**call, "function": {**function, "arguments": arguments}}


# -- responses


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """Parallel lists; `text_offset` counts characters from the start of the returned text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobEntry(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprobEntry]
    refusal: None


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """Also one chunk of a stream, where `usage` is null but in the last one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class ChatAnswer(TypedDict):
    role: str
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]


class ChatCompletion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


class Delta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]


class ChatChunk(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: str
    data: list[ModelCard]


class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    prompt: str
