"""From options to everything an engine starts with: the checkpoint, the resolved settings, the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from stenograph.config.facts import DeviceFacts
from stenograph.config.options import EngineOptions
from stenograph.config.resolve import Resolved, log_warnings, resolve
from stenograph.loading.source import ModelSource, open_model
from stenograph.tokenizer.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    resolved: Resolved
    source: ModelSource
    tokenizer: Tokenizer | None


def prepare(options: EngineOptions) -> Ready:
    """Opens the checkpoint (its weights are read later), resolves the settings on this machine, loads the tokenizer."""
    source = open_model(options.model, load_format=options.load_format, trust_remote_code=options.trust_remote_code)
    resolved = resolve(options, source.facts, DeviceFacts.probe(options.device))
    log_warnings(resolved)
    return Ready(resolved=resolved, source=source, tokenizer=load_tokenizer(source, resolved))
