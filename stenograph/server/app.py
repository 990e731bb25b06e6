"""The HTTP routes. Text is tokenised and detokenised here; the engine process sees token ids alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenograph.config import report
from stenograph.engine.client import AnswerStream, AsyncEngineClient
from stenograph.engine.types import EngineRequest
from stenograph.errors import EngineDeadError, RequestError
from stenograph.sampling.params import SamplingParams
from stenograph.server import protocol
from stenograph.server.answers import Answer, TokenTexts, Whole
from stenograph.server.errors import ClientGone, Unavailable, error_body, install_error_handlers, json_response
from stenograph.server.limits import Limits
from stenograph.server.metrics import Metrics
from stenograph.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from stenograph.server.streaming import Chunks, StreamedAnswer, check
from stenograph.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
LONG_TEXT = 16_384  # characters (or ids) from which prompts are tokenised in a thread, so that the event loop goes on


class Api:
    """What the routes share."""

    def __init__(
        self, client: AsyncEngineClient, resolved: Any, tokenizer: Tokenizer | None, *, limits: Limits | None = None
    ) -> None:
        self.client, self.resolved, self.tokenizer = client, resolved, tokenizer
        self.limits = limits or Limits()
        self.model: str = resolved.served_model_name
        self.created = int(time.time())
        self.texts = None if tokenizer is None else TokenTexts(tokenizer)
        self.metrics = Metrics(self.model, lambda: client.stats)
        client.observer = self.metrics
        self.draining = False
        self.open_requests = 0

    # -- checks

    def check_model(self, name: str | None) -> None:
        """An absent name means the served model. Raises `RequestError` (404)."""
        if name is not None and name != self.model:
            raise RequestError(
                f"The model {name[:100]!r} is not served here; {self.model!r} is.",
                param="model",
                code="model_not_found",
                status=404,
            )

    def check_open(self) -> None:
        """Raises `Unavailable` or `EngineDeadError` where no request is taken."""
        if self.draining:
            raise Unavailable(
                "The server is shutting down.", status=503, code="shutting_down", retry_after=self.limits.retry_after
            )
        if self.client.dead:
            raise EngineDeadError(self.client.problem() or "The engine is gone.")

    def check_queue(self, sequences: int) -> None:
        """Bounds what runs and waits together. Raises `Unavailable` (429), or `RequestError` for what could
        never fit."""
        if sequences > self.limits.max_sequences:
            raise RequestError(
                f"The request asks for {sequences} answers (prompts times n); at most {self.limits.max_sequences}.",
                param="n",
            )
        queue = self.resolved.max_queued_requests
        if queue is None:
            return
        room = self.resolved.max_running_requests + queue
        if sequences > room:
            raise RequestError(
                f"The request asks for {sequences} answers (prompts times n); the server holds {room} at once.",
                param="n",
            )
        if self.client.open_sequences + sequences > room:
            self.metrics.refused += 1
            raise Unavailable(
                f"The server is full: {self.client.open_sequences} answers run or wait, of {room} at most.",
                status=429,
                code="queue_full",
                retry_after=self.limits.retry_after,
            )

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The request's body. Raises `RequestError`."""
        content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            # A web page elsewhere can make a browser post plain text or a form here without asking; JSON it cannot.
            raise RequestError("The content type must be application/json.", code="unsupported_media_type", status=415)
        limit = self.limits.max_request_bytes
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise self._too_large()
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > limit:
                raise self._too_large()
        return protocol.parse(kind, bytes(data))

    def _too_large(self) -> RequestError:
        limit = self.limits.max_request_bytes
        return RequestError(f"The body is larger than {limit} bytes.", code="request_too_large", status=413)

    # -- prompts

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("This model has no tokenizer.", param=param, remedy="Use completions with token ids.")
        return self.tokenizer

    async def chat_ids(
        self, messages: list[protocol.ChatMessage], tools: Any, *, generation_prompt: bool = True
    ) -> list[int]:
        tokenizer = self.need_tokenizer("messages")
        plain = protocol.plain_messages(messages)
        calls = any("tool_calls" in m for m in plain)
        size = LONG_TEXT if tools or calls else sum(100 + len(m["content"]) for m in plain)

        def render() -> list[int]:
            return tokenizer.apply_chat_template(plain, tools=tools, add_generation_prompt=generation_prompt)

        return render() if size < LONG_TEXT else await asyncio.to_thread(render)

    async def prompt_ids(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        inputs = self.client.inputs
        assert inputs is not None

        def encode() -> list[list[int]]:
            return [inputs.encode(prompt) for prompt in prompts]

        return encode() if sum(map(len, prompts)) < LONG_TEXT else await asyncio.to_thread(encode)

    # -- answers

    async def answer(
        self,
        request: Request,
        body: GenerationRequest,
        params: SamplingParams,
        prompts: Sequence[list[int]],
        *,
        chat: bool,
        echo: Sequence[str] | None = None,
    ) -> Response:
        """Generates and responds, streaming or not; aborts when the client goes away."""
        self.check_queue(len(prompts) * params.n)
        requests: list[list[EngineRequest]] = [self.client.build(ids, params) for ids in prompts]
        answer = Answer(
            params,
            prompts,
            chat=chat,
            texts=self.texts,
            echo=echo,
            prompt_logprobs_asked=body.prompt_logprobs is not None,
        )
        kind = "chat.completion" if chat else "text_completion"
        head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "object": kind + ".chunk" if chat and body.stream else kind,
            "created": int(time.time()),
            "model": self.model,
        }
        headers = _ignored_header(body.ignored_fields())
        stream = self.client.submit(requests)
        watch = asyncio.create_task(_watch(request.receive, stream))
        self.open_requests += 1

        def end() -> None:
            watch.cancel()
            self.open_requests -= 1

        handed_over = False
        try:
            if body.stream:
                first = await stream.next()
                check(first)
                handed_over = True
                chunks = Chunks(answer, head, include_usage=body.include_usage)
                return StreamedAnswer(stream, chunks, first, headers=headers, on_end=end)
            whole = await _collect(stream, answer)
            return json_response(_whole_body(head, answer, whole), headers=headers)
        finally:
            if not handed_over:
                stream.close()
                end()


async def _watch(receive: Receive, stream: AnswerStream) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            stream.fail(ClientGone())
            return


async def _collect(stream: AnswerStream, answer: Answer) -> list[Whole]:
    wholes = [Whole() for _ in range(answer.num_choices)]
    while news := await stream.next():
        check(news)
        for prompt_index, delta in news:
            for piece in answer.pieces(prompt_index, delta):
                wholes[piece.index].add(piece)
    return wholes


def _whole_body(head: dict[str, Any], answer: Answer, wholes: list[Whole]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    body = {**head, "choices": choices, "usage": answer.usage()}
    for index, whole in enumerate(wholes):
        text = "".join(whole.texts)
        choice: dict[str, Any] = {"index": index}
        if answer.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            choice["logprobs"] = whole.chat_logprobs
        else:
            choice["text"] = text
            choice["logprobs"] = whole.completion_logprobs
        choice["finish_reason"], choice["stop_reason"] = whole.finish_reason, whole.stop_reason
        if whole.prompt_logprobs is not None:
            (body if answer.chat else choice)["prompt_logprobs"] = whole.prompt_logprobs
        choices.append(choice)
    return body


_FIELD_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def _ignored_header(fields: list[str]) -> dict[str, str]:
    if not fields:
        return {}
    shown = [name if _FIELD_NAME.fullmatch(name) else "?" for name in fields[:32]]
    return {"x-stenograph-ignored-fields": ", ".join(shown)}


def build_app(api: Api) -> FastAPI:
    app = FastAPI(title="Stenograph", version=metadata_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app)
    app.add_middleware(_RequestIds)
    routes = _Routes(app)

    @routes.post("/v1/chat/completions", ChatCompletionRequest, protocol.ChatCompletion)
    async def chat_completions(request: Request) -> Response:
        body = await api.read(request, ChatCompletionRequest)
        api.check_open()
        api.check_model(body.model)
        params, tools = body.sampling_params(), body.template_tools()
        try:
            ids = await api.chat_ids(body.messages, tools)
            return await api.answer(request, body, params, [ids], chat=True)
        except RequestError as error:
            raise _about_messages(error) from None

    @routes.post("/v1/completions", CompletionRequest, protocol.Completion)
    async def completions(request: Request) -> Response:
        body = await api.read(request, CompletionRequest)
        api.check_open()
        api.check_model(body.model)
        params = body.sampling_params()
        prompts = protocol.prompts_of(body.prompt, limit=api.limits.max_prompts)
        api.check_queue(len(prompts) * params.n)
        ids = await api.prompt_ids(prompts)
        echo = None
        if body.echo:
            tokenizer = api.need_tokenizer("echo")
            skip = params.skip_special_tokens
            echo = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=skip) for p in prompts]
        return await api.answer(request, body, params, ids, chat=False, echo=echo)

    @routes.get("/v1/models", protocol.ModelList)
    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [_card(api)]})

    @routes.get("/v1/models/{name:path}", protocol.ModelCard)
    async def model(request: Request) -> Response:
        api.check_model(request.path_params["name"])
        return json_response(_card(api))

    @routes.post("/tokenize", TokenizeRequest, protocol.Tokens)
    async def tokenize(request: Request) -> Response:
        body = await api.read(request, TokenizeRequest)
        api.check_model(body.model)
        tokenizer = api.need_tokenizer("prompt")
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give either prompt or messages.", param="prompt")
        if body.messages is not None:
            ids = await api.chat_ids(
                body.messages, body.tools, generation_prompt=body.add_generation_prompt is not False
            )
        else:
            assert body.prompt is not None
            ids = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens is not False)
        found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": api.resolved.context_length}
        if body.return_token_strs:
            assert api.texts is not None
            show = api.texts.show
            found["token_strs"] = await asyncio.to_thread(lambda: [show(token)[0] for token in ids])
        return json_response(found, headers=_ignored_header(list(body.model_extra or ())))

    @routes.post("/detokenize", DetokenizeRequest, protocol.Detokenized)
    async def detokenize(request: Request) -> Response:
        body = await api.read(request, DetokenizeRequest)
        api.check_model(body.model)
        tokenizer = api.need_tokenizer("tokens")
        if not isinstance(body.tokens, list):
            raise RequestError("tokens must be a list of token ids.", param="tokens")
        assert api.client.inputs is not None
        ids = api.client.inputs.encode(body.tokens) if body.tokens else []
        text = tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response({"prompt": text}, headers=_ignored_header(list(body.model_extra or ())))

    @routes.get("/health")
    async def health(_: Request) -> Response:
        problem = "The server is shutting down." if api.draining else api.client.problem()
        if problem is not None:
            return json_response(error_body(problem, status=503, code="unhealthy"), 503)
        return json_response({"status": "ok"})

    @routes.get("/server_info")
    async def server_info(_: Request) -> Response:
        return json_response(_server_info(api))

    @routes.get("/metrics")
    async def metrics(_: Request) -> Response:
        return Response(api.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _card(api: Api) -> dict[str, Any]:
    return {
        "id": api.model,
        "object": "model",
        "created": api.created,
        "owned_by": "stenograph",
        "max_model_len": api.resolved.context_length,
    }


def _server_info(api: Api) -> dict[str, Any]:
    return {
        "version": metadata_version(),
        "model": api.model,
        **report.as_json(api.resolved),
        "limits": asdict(api.limits),
        "stats": {
            **asdict(api.client.stats),
            "open_requests": api.open_requests,
            "open_sequences": api.client.open_sequences,
        },
    }


def _about_messages(error: RequestError) -> RequestError:
    """The engine speaks of the prompt; a chat client sent messages."""
    if error.param != "prompt":
        return error
    return RequestError(str(error), param="messages", code=error.code, status=error.status)


def metadata_version() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("stenograph")
    return "0"


class _RequestIds:
    """Gives every response an x-request-id: the client's own if it is a plain one. Nothing inside is keyed by it.

    What is sent to a client that has left is dropped.
    """

    _PLAIN = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if self._PLAIN.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            try:
                await send(message)
            except RuntimeError as error:
                # uvloop's word for it, for the moment in which uvicorn hasn't heard. Afterwards uvicorn drops it.
                if "the handler is closed" not in str(error):
                    raise

        await self.app(scope, receive, send_with_id)


# -- routes with their schemas, which the handlers read by hand: size limits, streams and error texts are ours

Handler = Callable[[Request], Any]


class _Routes:
    """Adds routes to the app, and their bodies to its OpenAPI document."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.schemas: dict[str, Any] = {}
        plain = app.openapi

        def openapi() -> dict[str, Any]:
            document = plain()
            document.setdefault("components", {}).setdefault("schemas", {}).update(self.schemas)
            return document

        app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the document

    def post(self, path: str, body: type[BaseModel], answer: Any) -> Callable[[Handler], Handler]:
        extra = {
            "requestBody": {"required": True, "content": self._content(body)},
            "responses": self._responses(answer),
        }
        return self.app.post(path, response_model=None, openapi_extra=extra)

    def get(self, path: str, answer: Any = None) -> Callable[[Handler], Handler]:
        return self.app.get(path, response_model=None, openapi_extra={"responses": self._responses(answer)})

    def _responses(self, answer: Any) -> dict[str, Any]:
        ok: dict[str, Any] = {"description": "The answer."}
        if answer is not None:
            ok["content"] = self._content(answer)
        return {"200": ok, "4XX": {"description": "An error.", "content": self._content(protocol.ErrorBody)}}

    def _content(self, kind: Any) -> dict[str, Any]:
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        self.schemas.update(schema.pop("$defs", {}))
        self.schemas[kind.__name__] = schema
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
