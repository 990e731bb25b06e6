"""Short ways to resolve in tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from stenograph.config.device import NAMED, DeviceFacts
from stenograph.config.facts import ModelFacts
from stenograph.config.options import EngineOptions
from stenograph.config.presets import preset_facts
from stenograph.config.resolve import Resolved, resolve
from stenograph.config.support import EVERYTHING, Support

CPU = DeviceFacts(name="cpu", kind="cpu", memory_bytes=64 << 30, count=8, cpu_count=8, bfloat16=True)
DEVICES = {"cpu": CPU, **NAMED}


@cache
def facts(name: str) -> ModelFacts:
    return preset_facts(name)


def settle(
    *, preset: str = "qwen3-8b", on: str | DeviceFacts = "h200", support: Support = EVERYTHING, **options: Any
) -> Resolved:
    """Resolves Python options for a preset on a named device, with every feature built unless `support` says less."""
    device = DEVICES[on] if isinstance(on, str) else on
    return resolve(EngineOptions.from_python(**options), facts(preset), device, support=support)
