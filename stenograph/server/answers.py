"""The engine's deltas -> choices of a response. Streams and whole answers go through the same pieces, so they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stenograph.engine.types import CompletionOutput, RequestOutput
from stenograph.sampling.params import SamplingParams, TokenLogprob
from stenograph.server.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprobEntry,
    TopLogprob,
    Usage,
)
from stenograph.tokenizer.detokenizer import Detokenizer
from stenograph.tokenizer.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class TokenTexts:
    """How single tokens are shown: (text, bytes). `bytes` is None for a token that is no part of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def show(self, token: int) -> tuple[str, list[int] | None]:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._show(token)
        return found

    def _show(self, token: int) -> tuple[str, list[int] | None]:
        raw = self.tokenizer.token_bytes(token)
        try:
            text = raw.decode()
        except UnicodeDecodeError:  # part of a character
            text = "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
        return text, None if token in self.tokenizer.special_ids else list(raw)


@dataclass(slots=True)
class Piece:
    """What one delta adds to one choice."""

    index: int
    text: str
    completion_logprobs: CompletionLogprobs | None = None
    chat_logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first: bool = False

    @property
    def has_content(self) -> bool:
        return bool(self.text) or self.completion_logprobs is not None or self.chat_logprobs is not None


@dataclass(slots=True)
class _Choice:
    offset: int = 0  # characters of the returned text so far
    detokenizer: Detokenizer | None = None  # for text offsets alone


@dataclass(slots=True)
class Whole:
    """One choice of a whole answer, added up from its pieces."""

    texts: list[str] = field(default_factory=list)
    completion_logprobs: CompletionLogprobs | None = None
    chat_logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason if piece.stop_reason is not None else self.stop_reason
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        if piece.completion_logprobs is not None:
            if self.completion_logprobs is None:
                self.completion_logprobs = piece.completion_logprobs
            else:
                mine, more = self.completion_logprobs, piece.completion_logprobs
                mine["tokens"] += more["tokens"]
                mine["token_logprobs"] += more["token_logprobs"]
                mine["top_logprobs"] += more["top_logprobs"]
                mine["text_offset"] += more["text_offset"]
        if piece.chat_logprobs is not None:
            if self.chat_logprobs is None:
                self.chat_logprobs = piece.chat_logprobs
            else:
                self.chat_logprobs["content"] += piece.chat_logprobs["content"]


class Answer:
    """State of one HTTP request's choices; choice index = prompt index * n + sequence.

    prompts    token ids of each prompt
    echo       the texts to return before each answer (completions with `echo`), else None
    chat       the form of log-probabilities
    prompt_logprobs_asked  whether the extension's own list is returned (`echo` asks the engine for them too)
    """

    def __init__(
        self,
        params: SamplingParams,
        prompts: Sequence[list[int]],
        *,
        chat: bool,
        texts: TokenTexts | None,
        echo: Sequence[str] | None = None,
        prompt_logprobs_asked: bool = False,
    ) -> None:
        self.params, self.prompts, self.chat, self.texts, self.echo = params, prompts, chat, texts, echo
        self.prompt_logprobs_asked = prompt_logprobs_asked
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}
        self._choices: dict[int, _Choice] = {}

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def pieces(self, prompt_index: int, delta: RequestOutput) -> list[Piece]:
        pieces = []
        if delta.cached_tokens:
            self._cached[prompt_index] = delta.cached_tokens
        for part in delta.outputs:
            self.completion_tokens += len(part.token_ids)
            index = prompt_index * self.params.n + part.index
            choice = self._choices.get(index)
            piece = Piece(index=index, text=part.text, finish_reason=part.finish_reason, stop_reason=part.stop_reason)
            if choice is None:
                choice = self._choices[index] = _Choice()
                piece.first = True
                if self.prompt_logprobs_asked and delta.prompt_logprobs is not None:
                    piece.prompt_logprobs = self._prompt_list(delta.prompt_logprobs)
            if part.logprobs is not None and self.chat:
                piece.chat_logprobs = {"content": self._chat_entries(part), "refusal": None}
            elif self.params.logprobs is not None and not self.chat:
                self._completion_logprobs(choice, piece, part, prompt_index, delta.prompt_logprobs)
            if piece.first and self.echo is not None:
                piece.text = self.echo[prompt_index] + piece.text
            pieces.append(piece)
        return pieces

    def usage(self) -> Usage:
        prompt_tokens = sum(len(ids) for ids in self.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    # -- log-probabilities

    def _hidden_last(self, part: CompletionOutput) -> bool:
        """Whether the part's last token ended the answer and is no part of its text."""
        by_token = part.finish_reason == "stop" and not isinstance(part.stop_reason, str)
        return by_token and not self.params.include_stop_str_in_output

    def _show(self, token: int) -> tuple[str, list[int] | None]:
        if self.texts is None:
            return str(token), None
        text, raw = self.texts.show(token)
        if raw is None and not self.params.skip_special_tokens:
            raw = list(self.texts.tokenizer.token_bytes(token))
        return text, raw

    def _chat_entries(self, part: CompletionOutput) -> list[TokenLogprobEntry]:
        entries: list[TokenLogprobEntry] = []
        for found in part.logprobs or ():
            text, raw = self._show(found.token_id)
            top: list[TopLogprob] = []
            for token, logprob in found.top[: self.params.logprobs]:
                top_text, top_raw = self._show(token)
                top.append({"token": top_text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": top_raw})
            entries.append(
                {"token": text, "logprob": max(found.logprob, LEAST_LOGPROB), "bytes": raw, "top_logprobs": top}
            )
        if entries and self._hidden_last(part):
            entries[-1]["bytes"] = None
        return entries

    def _completion_logprobs(
        self,
        choice: _Choice,
        piece: Piece,
        part: CompletionOutput,
        prompt_index: int,
        prompt_logprobs: list[TokenLogprob | None] | None,
    ) -> None:
        lists: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        prompt = self.prompts[prompt_index]
        skip = self.params.skip_special_tokens
        if piece.first:
            if self.echo is not None and prompt_logprobs is not None:
                before = None if self.texts is None else Detokenizer(self.texts.tokenizer, [], skip)
                for token, found in zip(prompt, prompt_logprobs, strict=True):
                    self._append(lists, choice, before, token, found)
            choice.offset = len(self.echo[prompt_index]) if self.echo is not None else 0
            if self.texts is not None:
                choice.detokenizer = Detokenizer(self.texts.tokenizer, prompt, skip)
        for found in part.logprobs or ():
            self._append(lists, choice, choice.detokenizer, found.token_id, found)
        if lists["tokens"]:
            piece.completion_logprobs = lists

    def _append(
        self,
        lists: CompletionLogprobs,
        choice: _Choice,
        detokenizer: Detokenizer | None,
        token: int,
        found: TokenLogprob | None,
    ) -> None:
        lists["tokens"].append(self._show(token)[0])
        lists["text_offset"].append(choice.offset)
        if detokenizer is not None:
            choice.offset += len(detokenizer.add([token]))
        if found is None:  # nothing comes before the first token of a prompt
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(max(found.logprob, LEAST_LOGPROB))
        top: dict[str, float] = {}
        for other, logprob in found.top[: self.params.logprobs]:
            top.setdefault(self._show(other)[0], max(logprob, LEAST_LOGPROB))
        top.setdefault(self._show(token)[0], max(found.logprob, LEAST_LOGPROB))
        lists["top_logprobs"].append(top)

    def _prompt_list(self, found: list[TokenLogprob | None]) -> PromptLogprobs:
        result: PromptLogprobs = []
        for entry in found:
            if entry is None:
                result.append(None)
                continue
            at: dict[str, dict[str, object]] = {}
            for rank, (token, logprob) in enumerate(entry.top[: self.params.prompt_logprobs], start=1):
                at[str(token)] = {
                    "logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": self._show(token)[0],
                }  # fmt: skip
            at[str(entry.token_id)] = {
                "logprob": max(entry.logprob, LEAST_LOGPROB),
                "rank": entry.rank,
                "decoded_token": self._show(entry.token_id)[0],
            }
            result.append(at)  # type: ignore[arg-type]  # built key by key
        return result
