"""Generate text from prompts (arguments, or standard input), streaming to standard output."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Annotated, Any

import typer

from stenograph.cli.flags import read_options, with_options
from stenograph.errors import RequestError
from stenograph.sampling.params import SamplingParams


@with_options()
def command(
    *,
    flags: dict[str, Any],
    config: str | None,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Text to continue; else standard input.")
    ] = None,
    chat: bool = typer.Option(False, "--chat", help="Send the prompt as a user's message, through the chat template."),
    max_tokens: int = typer.Option(256, "--max-tokens", min=1, help="Longest answer in tokens."),
    temperature: float = typer.Option(1.0, "--temperature", help="0 takes the most likely token each time."),
    top_k: int = typer.Option(0, "--top-k", help="Keep the k most likely tokens; 0: all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Keep the smallest set of tokens with this probability."),
    min_p: float = typer.Option(0.0, "--min-p", help="Drop tokens less likely than this share of the most likely one."),
    seed: int | None = typer.Option(None, "--seed", help="Same seed, same text."),
    repetition_penalty: float = typer.Option(1.0, "--repetition-penalty", help="Above 1: repeat less."),
    presence_penalty: float = typer.Option(0.0, "--presence-penalty", help="From -2 to 2."),
    frequency_penalty: float = typer.Option(0.0, "--frequency-penalty", help="From -2 to 2."),
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the answer at this text; may be given several times.")
    ] = None,
    min_tokens: int = typer.Option(0, "--min-tokens", help="Shortest answer in tokens."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on past the model's own end."),
) -> None:
    known = locals()
    given = {f.name: known[f.name] for f in fields(SamplingParams) if f.name in known and f.name != "stop"}
    params = SamplingParams(**given, stop=tuple(stop or ()))
    options = read_options(flags, config, quiet=True)
    texts = prompts or [_standard_input()]
    from stenograph.engine.llm import LLM

    llm = LLM.from_options(options)
    try:
        for text in texts:
            parts = llm.stream_chat([{"role": "user", "content": text}], params) if chat else llm.stream(text, params)
            for part in parts:
                if part.error:
                    raise RequestError(part.error)
                sys.stdout.write(part.outputs[0].text)
                sys.stdout.flush()
            sys.stdout.write("\n")
    finally:
        llm.shutdown()


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise RequestError("no prompt.", remedy='Give one: steno generate "The capital of France is".')
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise RequestError("the prompt on standard input is empty.", remedy="Send some text.")
    return text
