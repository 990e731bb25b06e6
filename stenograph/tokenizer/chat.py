"""Chat templates: Jinja in a sandbox, with the helpers that published templates use."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stenograph.errors import RequestError


class ChatTemplate:
    """A compiled template. Raises `RequestError` with the template's own words where it refuses a conversation."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.source, self._tokens = source, dict(tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(
                f"The chat template cannot be read: {error}.", param="messages", remedy="Set --chat-template to another one."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=[_plain(m) for m in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
                **extra,
            )
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content as a string: parts of text joined, null as empty (so that no template prints "None")."""
    made = dict(message)
    content = made.get("content")
    if content is None:
        made["content"] = ""
    elif not isinstance(content, str):
        made["content"] = "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return made


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _generation_tag() -> Any:
    """{% generation %} ... {% endgeneration %} marks what a model wrote, for training; rendering passes it through."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
