"""Stenograph serves large language models. This is its offline API:

>>> from stenograph import LLM, SamplingParams
>>> llm = LLM("smollm2-135m")
>>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

The names below are imported when they are first used, so that `import stenograph` costs nothing: the command line,
`steno explain` above all, starts without torch.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stenograph.engine.llm import LLM
    from stenograph.engine.types import RequestOutput
    from stenograph.sampling.params import SamplingParams

    __version__: str

__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "stenograph.engine.llm",
    "RequestOutput": "stenograph.engine.types",
    "SamplingParams": "stenograph.sampling.params",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            value: Any = metadata.version("stenograph")
        except metadata.PackageNotFoundError:
            value = "0+source"  # used from a source tree without being installed
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
