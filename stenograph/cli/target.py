"""What `explain` and `plan` are asked about: options, a model's facts, a device's facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stenograph.cli.flags import read_options
from stenograph.config.device import DeviceFacts, device_facts
from stenograph.config.facts import ModelFacts
from stenograph.config.options import EngineOptions, nearest
from stenograph.config.presets import facts_without_weights, preset_facts
from stenograph.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    options: EngineOptions
    facts: ModelFacts
    device: DeviceFacts


def find_target(
    flags: Mapping[str, Any],
    config: str | None,
    *,
    model: str | None,
    preset: str | None,
    device: str | None,
    format: str,
) -> Target:
    if format not in ("table", "json"):
        close = nearest(format, ("table", "json"))
        raise ConfigError(
            f"--format is {format!r}; it must be table or json.", remedy=f"Did you mean {close}?" if close else ""
        )
    if preset is not None and (model is not None or "model" in flags):
        raise ConfigError("a model and --model-preset are both given.", remedy="Name one of them.")
    found = None
    given = dict(flags)
    if device is not None:
        found = device_facts(device)
        given["device"] = found.kind if device != "auto" else "auto"
    options = read_options(given, config, model=model or preset, spelled="--model-preset" if preset else "MODEL")
    return Target(
        options=options,
        facts=preset_facts(preset) if preset is not None else _facts(options),
        device=found if found is not None else device_facts(options.device),
    )


def _facts(options: EngineOptions) -> ModelFacts:
    facts = facts_without_weights(options.model)
    if facts is not None:
        return facts
    from stenograph.loading.source import open_model  # GGUF files and the hub's cache; heavier

    return open_model(options.model, load_format=options.load_format, weights=False).facts
