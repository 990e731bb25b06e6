"""The published shapes of well-known models, to explain and plan without downloading anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from stenograph.config.facts import ModelFacts
from stenograph.config.options import DEFAULT_MODEL, nearest
from stenograph.errors import ConfigError, ModelLoadError


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Preset name -> {"id": Hugging Face id, "config": the shape in config.json's layout}."""
    content: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
    )
    return content


def preset_facts(name: str) -> ModelFacts:
    """Facts of a preset, by its name or its Hugging Face id. Raises `ConfigError` naming the nearest preset."""
    key = _find(name)
    if key is None:
        close = nearest(name.lower(), presets())
        raise ConfigError(
            f"no preset is named {name}.",
            remedy=(f"Did you mean {close}? " if close else "") + f"There are {', '.join(presets())}.",
        )
    return ModelFacts.from_config(presets()[key]["config"])


def facts_without_weights(model: str) -> ModelFacts | None:
    """Facts of a model from a directory's config.json or a preset's shape; None where its checkpoint must be opened."""
    try:
        path = Path(model).expanduser()
        has_config, exists = (path / "config.json").is_file(), path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, not permitted, nobody's home: opening it tells
        return None
    if has_config:
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise ModelLoadError(f"{path / 'config.json'} is no readable JSON object.", remedy="Fetch it again.")
        return ModelFacts.from_config(config)
    if exists or _find(model) is None:
        return None
    facts = preset_facts(model)
    return replace(facts, quantization="gguf") if model == DEFAULT_MODEL else facts  # the demo model is a GGUF file


def _find(name: str) -> str | None:
    wanted = name.lower()
    for key, entry in presets().items():
        if wanted in (key, entry["id"].lower()):
            return key
    return None
