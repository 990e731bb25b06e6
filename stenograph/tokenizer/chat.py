"""Chat templates: a conversation -> the text that the model was trained to continue.

The dialect is Jinja as transformers documents it for chat templates ("Chat templates", "Template writing guide").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from stenograph.errors import ModelLoadError, RequestError

# What template code raises for messages that it was not written for.
MISTAKES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """Templates by name: "default", and for some models "tool_use", which is taken where tools are given.

    Compiled when first used: a model with a broken template can still complete text.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str] | None = None) -> None:
        self.sources = dict(sources)
        self.variables = dict(variables or {})  # the tokenizer's own: bos_token, eos_token, ...
        self._compiled: dict[str, Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Raises `RequestError` with the template's own words where it refuses the conversation."""
        from jinja2 import TemplateError

        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        try:
            return self._template(name).render(
                **{
                    **self.variables,
                    "documents": None,
                    **variables,
                    "messages": messages,
                    "tools": tools or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _Refusal as error:
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from None
        except (TemplateError, *MISTAKES) as error:
            raise RequestError(
                f"The chat template cannot be rendered for these messages: {error}", param="messages"
            ) from None

    def check(self) -> None:
        """Raises `ModelLoadError` where a template is no valid Jinja."""
        from jinja2 import TemplateError

        for name in self.sources:
            try:
                self._template(name)
            except TemplateError as error:
                raise ModelLoadError(f"The chat template is not valid: {error}.", remedy="Correct it.") from None

    def _template(self, name: str) -> Any:
        if name not in self._compiled:
            source = self.sources.get(name) or next(iter(self.sources.values()))
            self._compiled[name] = _environment().from_string(source)
        return self._compiled[name]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is a string, so that no template prints "None" or a list. Raises `RequestError`."""
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{i}] is {message!r:.80}, no message.",
                param="messages",
                remedy='Give {"role": ..., "content": ...}.',
            )
    return [{**message, "content": _text_of(message.get("content"), i)} for i, message in enumerate(messages)]


def _text_of(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"messages[{index}].content is no text.", param="messages")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise RequestError(
                f"messages[{index}].content holds a part that is no text.", param="messages", remedy="Send text parts."
            )
        texts.append(text)
    return "\n".join(texts)


class _Refusal(Exception):
    """What a template says through raise_exception."""


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Any:
    """Sandboxed: a template comes with a checkpoint, and must neither reach this process nor change the messages."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """{% generation %} marks what training learns from; its body is all there is to it here."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
