"""Architecture names of config.json -> model classes, imported when asked for."""

from __future__ import annotations

import importlib

from stenograph.config.facts import ModelFacts
from stenograph.errors import ModelLoadError
from stenograph.layers.linear import Build
from stenograph.models.base import CausalLM

MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),  # with a sliding window, where config.json sets one
    "Qwen2ForCausalLM": ("llama", "LlamaForCausalLM"),  # with a bias on queries, keys and values
    "Qwen3ForCausalLM": ("llama", "LlamaForCausalLM"),  # with each query and key head normalised before the rotation
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
}
"""Architecture -> (module, class). Llama's layer reads what sets its relatives apart from `ModelFacts`."""
ALIASES = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
"""Multi-modal wrappers whose text model is served."""


def get_model_class(architecture: str) -> type[CausalLM]:
    """Raises `ModelLoadError` listing the known ones."""
    name = ALIASES.get(architecture, architecture)
    if name not in MODELS:
        raise ModelLoadError(
            f"The architecture {architecture!r} is not supported.", remedy=f"Supported: {', '.join(MODELS)}."
        )
    module, class_name = MODELS[name]
    model_class = getattr(importlib.import_module(f"stenograph.models.{module}"), class_name)
    assert issubclass(model_class, CausalLM)
    return model_class


def build_model(build: Build, facts: ModelFacts, context_length: int) -> CausalLM:
    """The model with no weights yet."""
    return get_model_class(facts.architecture)(build, facts, context_length)
