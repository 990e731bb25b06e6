"""Resolution is quick enough to be run everywhere. CPU time, so that a busy machine doesn't matter."""

from __future__ import annotations

import time

from stenograph.config.options import EngineOptions
from stenograph.config.resolve import resolve
from stenograph.config.support import EVERYTHING
from tests.config.helpers import DEVICES, facts


def test_a_thousand_resolutions_in_a_second() -> None:
    model, device = facts("qwen3-8b"), DEVICES["b200"]
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        for page in (None, 1, 16, 128) * 250:
            resolve(EngineOptions(attention_backend="fa4", page_size=page), model, device, support=EVERYTHING)
        best = min(best, time.process_time() - began)
    assert best < 1.0
