"""Fills a model with a source's weights, and says by name what is missing or too much."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from stenograph.config.facts import ModelFacts
from stenograph.errors import ModelLoadError
from stenograph.loading.source import ModelSource

IGNORED = re.compile(r".*(rotary_emb\.inv_freq|\.masked_bias|attn\.bias)$")
"""Buffers that some checkpoints carry and that are computed here."""
OTHER_MODALITIES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_vision)\.")
LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.(model\.)?")
NAMES_SHOWN = 5
WORTH_THREADS = 4_000_000
"""Weights a matrix. SmolLM2-135M's load in 1.6 s on one thread, and on two of two busy cores in 5 to 8."""


def load_model(source: ModelSource, model: Any, *, rank: int = 0, world_size: int = 1, progress: bool = True) -> None:
    """Raises `ModelLoadError` naming weights that are missing, unexpected, of another shape, or damaged."""
    if source.format == "dummy":
        from stenograph.loading.dummy import fill_with_random_weights

        fill_with_random_weights(model, rank)
        model.finish_loading()
        return
    with _few_threads(source.facts):
        _load(source, model, progress=progress and not rank)


@contextmanager
def _few_threads(facts: ModelFacts) -> Iterator[None]:
    """One thread for small matrices: threads wait for each other after each operation, and where other work holds a
    core (a server's other process starting up) that takes longer than the operation itself."""
    import torch

    threads = torch.get_num_threads()
    if facts.hidden_size * facts.intermediate_size < WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _load(source: ModelSource, model: Any, *, progress: bool) -> None:
    import torch

    unexpected = []
    bar = tqdm(
        source.weights(),
        total=source.num_weights(),
        desc="Loading weights",
        unit="tensor",
        disable=None if progress else True,  # None: shown on a terminal only
        leave=False,
    )
    for original, value in bar:
        name = _language_name(original)
        if name is None:
            continue
        try:
            taken = model.load_weight(name, value)
        except ValueError as error:
            raise ModelLoadError(
                f"{original} {error}.", remedy="config.json and the weights don't belong together."
            ) from error
        if not taken and not IGNORED.fullmatch(name):
            unexpected.append(original)
        if taken and isinstance(value, torch.Tensor) and not value.is_floating_point():
            raise ModelLoadError(
                f"{original} holds {str(value.dtype).removeprefix('torch.')}, no floating-point numbers.",
                remedy="Take a checkpoint in bfloat16, float16 or float32, or a GGUF file.",
            )
    missing = model.missing_weights()
    if missing:
        raise ModelLoadError(f"The checkpoint lacks {_some(missing)}.", remedy="Fetch it again, or check config.json.")
    if unexpected:
        raise ModelLoadError(
            f"The checkpoint holds weights that {source.facts.architecture} does not have: {_some(unexpected)}.",
            remedy="config.json may name the wrong architecture.",
        )
    model.finish_loading()


def _language_name(name: str) -> str | None:
    """The name within the language model; None for another modality's weight."""
    if OTHER_MODALITIES.match(name):
        return None
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return LANGUAGE_MODEL.sub("model.", name)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
