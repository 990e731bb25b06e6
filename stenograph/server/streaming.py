"""Server-sent events: an answer's pieces -> chunks on the wire.

For each choice: content chunks with finish_reason null, then one empty chunk with the reason; after all choices one
usage chunk without choices if it was asked for; then [DONE]. An error after the first byte ends the stream with an
error event and no [DONE]. All that one step of the engine brings leaves in one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stenograph.engine.client import AnswerStream
from stenograph.engine.types import RequestOutput
from stenograph.errors import StenographError
from stenograph.server.answers import Answer, Piece
from stenograph.server.errors import ClientGone, GenerationError, describe

log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode

News = list[tuple[int, RequestOutput]]


def check(news: News) -> None:
    """Raises `GenerationError` where the engine gave up on a sequence."""
    for _, delta in news:
        if delta.error is not None:
            raise GenerationError(delta.error)
        for part in delta.outputs:
            if part.finish_reason not in (None, "stop", "length"):
                raise GenerationError("The engine ended the request before its answer was complete.")


class Chunks:
    """Encodes pieces as chunks of one stream. `head` holds the fields that all chunks share."""

    def __init__(self, answer: Answer, head: dict[str, Any], *, include_usage: bool) -> None:
        self.answer, self.include_usage = answer, include_usage
        self._head = {**head, "usage": None} if include_usage else head

    def encode(self, news: News) -> bytes:
        add = self._chat if self.answer.chat else self._completion
        chunks: list[bytes] = []
        for prompt_index, delta in news:
            for piece in self.answer.pieces(prompt_index, delta):
                add(piece, chunks)
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self.include_usage:
            return DONE
        return _event({**self._head, "choices": [], "usage": self.answer.usage()}) + DONE

    def _chat(self, piece: Piece, chunks: list[bytes]) -> None:
        def chunk(delta: dict[str, str], beside: dict[str, Any] | None = None, **more: Any) -> None:
            choice = {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            chunks.append(_event({**self._head, "choices": [choice], **(beside or {})}))

        if piece.first:
            beside = None if piece.prompt_logprobs is None else {"prompt_logprobs": piece.prompt_logprobs}
            chunk({"role": "assistant", "content": ""}, beside)
        if piece.has_content:
            chunk({"content": piece.text}, logprobs=piece.chat_logprobs)
        if piece.finish_reason is not None:
            chunk({}, finish_reason=piece.finish_reason, stop_reason=piece.stop_reason)

    def _completion(self, piece: Piece, chunks: list[bytes]) -> None:
        def chunk(text: str, **more: Any) -> None:
            choice = {"index": piece.index, "text": text, "logprobs": None, "finish_reason": None, **more}
            chunks.append(_event({**self._head, "choices": [choice]}))

        if piece.has_content:
            extra = {} if piece.prompt_logprobs is None else {"prompt_logprobs": piece.prompt_logprobs}
            chunk(piece.text, logprobs=piece.completion_logprobs, **extra)
        elif piece.prompt_logprobs is not None:
            chunk("", prompt_logprobs=piece.prompt_logprobs)
        if piece.finish_reason is not None:
            chunk("", finish_reason=piece.finish_reason, stop_reason=piece.stop_reason)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class StreamedAnswer(Response):
    """Writes the stream. `first` is news already read: headers leave with the first token, so that an error before it
    still has its own status. `on_end` is called once, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: AnswerStream,
        chunks: Chunks,
        first: News,
        *,
        headers: dict[str, str],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._chunks, self._first, self._on_end = stream, chunks, first, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            pass
        except OSError:  # the connection broke in the middle of a write
            pass
        finally:
            self._stream.close()
            self._on_end()

    async def _write(self, send: Send) -> None:
        news = self._first
        try:
            while news:
                check(news)
                if data := self._chunks.encode(news):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                news = await self._stream.next()
            last = self._chunks.end()
        except StenographError as error:
            last = _event(describe(error)[0])
        except (ClientGone, OSError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.exception("A stream failed")
            last = _event(describe(error)[0])
        await send({"type": "http.response.body", "body": last, "more_body": True})
