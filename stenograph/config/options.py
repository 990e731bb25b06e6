"""Every option of the engine, declared once: type, default, limits, help.

The command line's flags, the `STENOGRAPH_*` variables, the YAML file's keys, `LLM(...)`'s keyword arguments and
docs/settings.md all come from `EngineOptions`. It knows which fields somebody set (`explicit`), so a value that equals
the default still counts as set.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from stenograph.errors import ConfigError

DEFAULT_MODEL: Final = "smollm2-135m"
ATTENTION_BACKENDS: Final = ("torch_native", "triton", "flashinfer", "fa3", "fa4")
GRAPH_BACKENDS: Final = ("full", "piecewise", "trace", "disabled")
PAGE_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KV_DTYPES: Final = ("auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2")
QUANTIZATIONS: Final = ("none", "gguf", "fp8", "awq", "gptq", "compressed-tensors", "bitsandbytes", "mxfp4")


class _Unset:
    """Stands for no argument at all in `EngineOptions(...)`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option's declaration. `kind` is int, float, bool, str or ints (a list of integers)."""

    name: str
    kind: str
    default: Any
    optional: bool  # None is a value: leave it to the rules, or off
    help: str
    group: str
    auto: str = ""  # what is done where it is unset and the default is None or "auto"
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    also: tuple[int, ...] = ()  # values outside the range with a meaning of their own, told in `help`

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "STENOGRAPH_" + self.name.upper()

    def is_automatic(self, value: Any) -> bool:
        """Whether the value says: leave it to the rules. That is as good as unset."""
        return (value is None and self.optional) or (value == "auto" and self.default == "auto")

    def parse(self, text: str) -> Any:
        """A value from text (flag, environment, file). Raises `ConfigError`; checks the value too."""
        word = text.strip()
        if self.optional and word.lower() in ("none", "auto", "null") and word.lower() not in self.choices:
            return None
        if self.kind == "str":
            return self.check(text if not self.choices else word)
        if self.kind == "bool":
            return self.check(_TRUTH.get(word.lower(), text))
        try:
            if self.kind == "int":
                return self.check(int(word))
            if self.kind == "float":
                return self.check(float(word))
            items = word.strip("[]").replace(",", " ").split()
            return self.check(tuple(int(item) for item in items)) if items else self.check(text)
        except ConfigError:
            raise
        except ValueError:
            raise self._wrong(text) from None

    def check(self, value: Any) -> Any:
        """The value in its own type (a list as a sorted tuple without repeats, a float for an integer where floats
        go). Raises `ConfigError`."""
        if value is None and self.optional:
            return None
        kind = self.kind
        if kind == "bool":
            if isinstance(value, bool):
                return value
        elif kind == "str":
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            if isinstance(value, str) and value and (not self.choices or value in self.choices):
                return value
        elif kind == "int":
            if self._int_ok(value):
                return value
        elif kind == "float":
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and math.isfinite(value) and self._in_range(value):
                return float(value)
        elif isinstance(value, (list, tuple)) and all(self._int_ok(item) for item in value):
            return tuple(sorted(set(value)))
        raise self._wrong(value)

    def _int_ok(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        if self.choices:
            return value in self.choices
        return value in self.also or self._in_range(value)

    def _in_range(self, value: float) -> bool:
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return False
        return self.high is None or value <= self.high

    def _wrong(self, value: Any) -> ConfigError:
        hint = ""
        if self.choices and isinstance(value, str):
            close = nearest(value, [str(choice) for choice in self.choices])
            hint = f"Did you mean {close}?" if close else ""
        return ConfigError(f"{self.name} ({self.flag}) is {value!r}; it must be {self.expects()}.", remedy=hint)

    def expects(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        span = ""
        if self.low is not None and self.high is not None:
            span = f" in {'(' if self.open_low else '['}{self.low}, {self.high}]"
        elif self.low is not None:
            span = f" of at least {self.low}"
        also = "".join(f" or {value}" for value in self.also)
        words = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text that isn't empty"}
        return words.get(self.kind, "a list of one or more integers, each") + span + also


_TRUTH: Final[dict[str, bool]] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None where nothing is like it."""
    import difflib  # costs milliseconds, and only errors need it

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def option(
    default: Any,
    *,
    help: str,
    group: str,
    auto: str = "",
    choices: Sequence[Any] = (),
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    also: tuple[int, ...] = (),
) -> Any:
    declared = {
        "default": default, "help": help, "group": group, "auto": auto, "choices": tuple(choices),
        "low": low, "high": high, "open_low": open_low, "also": also,
    }  # fmt: skip
    return field(default=UNSET, metadata={"option": declared})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One place that set a value. `source` is env, file, flag or python; `detail` the variable, file or flag."""

    value: Any
    source: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What was asked. Construction checks every value and raises `ConfigError`.

    `from_python` also turns an unknown name into one."""

    # -- model
    model: str = option(
        DEFAULT_MODEL, group="model", help="Hugging Face id, directory, GGUF file, or smollm2-135m (the demo model)."
    )
    served_model_name: str | None = option(
        None, group="model", help="The name that API clients use.", auto="the model's name"
    )
    tokenizer: str | None = option(None, group="model", help="Tokenizer to load.", auto="the model's own")
    chat_template: str | None = option(
        None, group="model", help="File with a Jinja chat template.", auto="the model's own"
    )
    load_format: str = option(
        "auto", group="model", choices=("auto", "safetensors", "gguf", "dummy"),
        help="Form of the weights; dummy makes random weights from config.json alone.", auto="by the files found",
    )  # fmt: skip
    dtype: str = option(
        "auto", group="model", choices=("auto", "float32", "bfloat16", "float16"),
        help="Number type of weights and activations.",
        auto="GPU: the checkpoint's (float32 becomes bfloat16); CPU: bfloat16 where it has instructions for it",
    )  # fmt: skip
    quantization: str | None = option(
        None, group="model", choices=QUANTIZATIONS, help="How the weights are quantised.", auto="the checkpoint's"
    )
    context_length: int | None = option(
        None, group="model", low=1, help="Longest prompt plus answer, in tokens.", auto="the model's"
    )
    trust_remote_code: bool = option(False, group="model", help="Allow tokenizer code that comes with the model.")
    special_tokens_in_content: bool = option(
        False, group="model", help="Let control-token text inside messages become control tokens: for trusted callers."
    )
    random_seed: int = option(0, group="model", low=0, high=2**63 - 1, help="Seed of requests without one.")

    # -- device
    device: str = option(
        "auto", group="device", choices=("auto", "cuda", "cpu"), help="Where the model runs.",
        auto="the GPU if there is one",
    )  # fmt: skip
    threads: int | None = option(
        None, group="device", low=1, high=1024, help="CPU threads of the engine.", auto="one a core"
    )
    tp_size: int = option(
        1, group="device", low=1, help="Tensor parallelism: GPUs (or CPU processes) that share a model."
    )

    # -- memory
    page_size: int | None = option(
        None, group="memory", choices=PAGE_SIZES, help="Tokens in a page of the KV cache.",
        auto="the smallest the backends accept that keeps page tables small",
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto", group="memory", choices=KV_DTYPES, help="Number type of the KV cache.", auto="dtype"
    )
    mem_fraction_static: float | None = option(
        None, group="memory", low=0, high=1, open_low=True,
        help="Share of the device's memory for the engine: weights, KV, activations (CPU: of what weights leave).",
        auto="GPU: all but 1 GiB, or less on small ones; CPU: 0.5",
    )  # fmt: skip
    kv_cache_sizing: str = option(
        "auto", group="memory", choices=("auto", "virtual", "trial"),
        help="How a GPU's KV cache gets what recordings leave: addresses reserved first and mapped afterwards, "
        "or a trial capture.", auto="virtual where the driver can",
    )  # fmt: skip
    ledger_plot: str | None = option(
        None, group="memory", help="PNG file for a picture of where the memory went.", auto="none"
    )
    max_total_tokens: int | None = option(
        None, group="memory", low=1, help="Cap on the tokens that the KV cache holds.", auto="by memory"
    )
    prefix_cache: bool | None = option(
        None,
        group="memory",
        help="Keep finished prompts' KV pages for requests that begin alike.",
        auto="on if possible",
    )

    # -- attention
    attention_backend: str | None = option(
        None, group="attention", choices=ATTENTION_BACKENDS, help="Attention kernels of both phases.", auto="by device"
    )
    prefill_attention_backend: str | None = option(
        None,
        group="attention",
        choices=ATTENTION_BACKENDS,
        help="Attention kernels of prefill.",
        auto="attention_backend",
    )
    decode_attention_backend: str | None = option(
        None,
        group="attention",
        choices=ATTENTION_BACKENDS,
        help="Attention kernels of decode.",
        auto="attention_backend",
    )

    # -- scheduling
    max_running_requests: int | None = option(
        None, group="scheduling", low=1, help="Requests that run at the same time.", auto="by device"
    )
    max_queued_requests: int | None = option(
        None, group="scheduling", low=1, help="Requests that may wait; more are refused (HTTP 429).", auto="no limit"
    )
    chunked_prefill_size: int | None = option(
        None, group="scheduling", low=1, also=(-1,),
        help="Prefill tokens of one step; longer prompts are cut in chunks. -1: never cut.", auto="by device",
    )  # fmt: skip
    overlap_schedule: bool | None = option(
        None, group="scheduling", help="Plan the next step while the device runs this one.", auto="on if possible"
    )

    # -- graphs
    cuda_graph_backend_decode: str | None = option(
        None, group="graphs", choices=GRAPH_BACKENDS, help="How decode steps are recorded.", auto="full if possible"
    )
    cuda_graph_backend_prefill: str | None = option(
        None, group="graphs", choices=GRAPH_BACKENDS, help="How prefill steps are recorded.",
        auto="piecewise, or full where every backend in use can",
    )  # fmt: skip
    cuda_graph_bs: tuple[int, ...] | None = option(
        None, group="graphs", low=1, help="Batch sizes of decode to record.", auto="a ladder up to max_running_requests"
    )
    cuda_graph_prefill_tokens: tuple[int, ...] | None = option(
        None, group="graphs", low=1, help="Token counts of prefill to record.", auto="a ladder up to the chunk size"
    )
    cuda_graph_prefill_slots: int | None = option(
        None, group="graphs", low=1, help="Request slots of one full prefill graph.", auto="up to 16"
    )
    cuda_graph_capture_order: str = option(
        "descending", group="graphs", choices=("descending", "ascending"),
        help="Order of recording; descending takes less memory, the outputs are the same.",
    )  # fmt: skip
    cuda_graph_capture: str = option(
        "eager", group="graphs", choices=("eager", "lazy"),
        help="Record every size before serving, or each at its first use inside --cuda-graph-lazy-mib of memory.",
    )  # fmt: skip
    cuda_graph_lazy_mib: int | None = option(
        None, group="graphs", low=1, help="MiB set aside at start for recordings made later.",
        auto="512 where cuda_graph_capture is lazy",
    )  # fmt: skip
    cuda_graph_streams: int = option(
        1, group="graphs", low=1, high=4,
        help="Sets of recordings and static buffers, so that batches can replay on so many streams at a time.",
    )  # fmt: skip
    cuda_graph_verify: str = option(
        "sample", group="graphs", choices=("sample", "all", "none"),
        help="Which recordings are compared with the eager pass before serving: one size in eight, all, or none.",
    )  # fmt: skip
    verify_replays: bool = option(
        False, group="graphs", help="Before each replay, also check every address that the recording reads."
    )

    # -- speculation
    speculative_algorithm: str | None = option(
        None, group="speculation", choices=("eagle", "eagle3", "ngram"), help="How tokens are drafted.", auto="off"
    )
    speculative_draft_model_path: str | None = option(
        None, group="speculation", help="The draft model of EAGLE.", auto="none"
    )
    speculative_num_steps: int | None = option(
        None, group="speculation", low=1, high=64, help="Draft steps a round.", auto="by algorithm"
    )
    speculative_eagle_topk: int | None = option(
        None, group="speculation", low=0, high=64, help="Branches at each draft step. 0: no speculation.",
        auto="by algorithm",
    )  # fmt: skip
    speculative_num_draft_tokens: int | None = option(
        None, group="speculation", low=1, high=1024, help="Tokens that one verification checks.",
        auto="what the tree of steps and top-k holds, at most 16 where it branches",
    )  # fmt: skip

    # -- server
    host: str = option("127.0.0.1", group="server", help="Address to listen on.")
    port: int = option(8000, group="server", low=0, high=65535, help="Port to listen on. 0: any free one.")
    log_level: str = option(
        "info", group="server", choices=("debug", "info", "warning", "error"), help="Least severe message to log."
    )
    strict: bool = option(False, group="server", help="Refuse to start rather than change a setting that you made.")

    asked: Mapping[str, tuple[Asked, ...]] = field(default_factory=dict, compare=False, repr=False)
    explicit: frozenset[str] = field(init=False, repr=False)  # names of the fields that somebody set

    def __post_init__(self) -> None:
        put = object.__setattr__
        trail = dict(self.asked)
        explicit = set()
        for name, declared in OPTIONS.items():
            value = getattr(self, name)
            if value is UNSET or declared.is_automatic(value):
                put(self, name, declared.default)
                continue
            value = declared.check(value)
            put(self, name, value)
            explicit.add(name)
            if name not in trail:
                trail[name] = (Asked(value=value, source="python"),)
        put(self, "asked", trail)
        put(self, "explicit", frozenset(explicit))

    @classmethod
    def from_python(cls, **values: Any) -> EngineOptions:
        """Options from names and values; a name that doesn't exist is a `ConfigError` with the nearest one."""
        for name in values:
            if name not in OPTIONS:
                raise unknown_option(name)
        return cls(**values)

    def is_set(self, name: str) -> bool:
        return name in self.explicit

    def set_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTIONS if name in self.explicit}


def unknown_option(name: str, *, kind: str = "option", spell: Mapping[str, str] | None = None) -> ConfigError:
    spelled = spell or {n: n for n in OPTIONS}
    close = nearest(name, spelled)
    return ConfigError(f"unknown {kind} {name}.", remedy=f"Did you mean {spelled[close]}?" if close else "")


def _declare() -> dict[str, Option]:
    declared = {}
    for f in fields(EngineOptions):
        if "option" not in f.metadata:
            continue
        annotation = str(f.type)
        optional = annotation.endswith(" | None")
        kind = "ints" if annotation.startswith("tuple") else annotation.removesuffix(" | None")
        declared[f.name] = Option(name=f.name, kind=kind, optional=optional, **f.metadata["option"])
    return declared


OPTIONS: Final[Mapping[str, Option]] = _declare()
