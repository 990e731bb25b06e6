"""Runs a server for a test: `python -m tests.server.run_server '{"core": "echo" | "real", "options": {...}, ...}'`."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from stenograph.engine.client import Liveness
from stenograph.errors import StenographError
from stenograph.server.launch import serve
from stenograph.server.limits import Limits
from tests.server.fake_core import make_echo_core


def settings(options: dict[str, Any]) -> Any:
    from stenograph.config.device import device_facts
    from stenograph.config.options import EngineOptions
    from stenograph.config.resolve import resolve
    from stenograph.loading.source import open_model

    asked = EngineOptions.from_python(**options)
    source = open_model(asked.model)
    return resolve(asked, source.facts, device_facts("cpu"))


def main() -> None:
    given = json.loads(sys.argv[1])
    resolved = settings(given["options"])
    extra: dict[str, Any] = {
        "limits": Limits(**given.get("limits", {})),
        "liveness": Liveness(**given.get("liveness", {})),
    }
    if given.get("core") == "echo":
        shown = {"settings": resolved.settings, "warnings": resolved.warnings}
        resolved = SimpleNamespace(**resolved.values(), **shown, step_seconds=given["step_seconds"])
        extra["make_core"] = make_echo_core
    try:
        serve(resolved, **extra)
    except StenographError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
