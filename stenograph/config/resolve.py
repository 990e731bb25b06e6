"""`resolve`: what was asked + the model + the device -> `Resolved`, with who set each value and why.

Passes run in declared order until nothing changes. Each one's word is kept as a layer of its own above what was asked:
fills below, all other passes above them, later ones on top. When a pass runs again its old layer is lifted first, so it
never answers to itself, and so the outcome doesn't hang on the order in which independent passes were declared. A pass
is pure, so it runs again only when something that it read has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stenograph.config import rules
from stenograph.config.device import DeviceFacts
from stenograph.config.facts import ModelFacts
from stenograph.config.options import OPTIONS, EngineOptions
from stenograph.config.passes import PASSES, Because, Conflict, Pass, PassError, View
from stenograph.config.support import THIS_VERSION, Support
from stenograph.errors import ConfigError

logger = logging.getLogger(__name__)
_DEFAULTS: Mapping[str, Any] = {name: option.default for name, option in OPTIONS.items()}


class Step(NamedTuple):
    """One entry of a setting's history. `source` is default, env, file, flag, python, or the name of a pass."""

    value: Any
    source: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One resolved setting: its value, who had the last word and why, what the user asked for (None: nothing)."""

    name: str
    value: Any
    source: str
    reason: str
    asked: Any
    history: tuple[Step, ...]

    @property
    def changed(self) -> bool:
        """Whether it is anything but the plain default."""
        return self.source != "default"


class Resolved:
    """What will run: `resolved.page_size` for every option. Frozen, picklable, compared by its values."""

    __slots__ = ("_layers", "_values", "device_facts", "facts", "options", "warnings")

    facts: ModelFacts
    device_facts: DeviceFacts
    options: EngineOptions
    warnings: tuple[str, ...]

    def __init__(
        self, values: dict[str, Any], layers: dict[str, tuple[Step, ...]], options: EngineOptions, facts: ModelFacts,
        device: DeviceFacts, warnings: tuple[str, ...],
    ) -> None:  # fmt: skip
        put = object.__setattr__
        put(self, "_values", values)
        put(self, "_layers", layers)
        put(self, "options", options)
        put(self, "facts", facts)
        put(self, "device_facts", device)
        put(self, "warnings", warnings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no setting is named {name}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("settings are frozen once resolved")

    def __reduce__(self) -> tuple[Any, ...]:
        return Resolved, (
            self._values, self._layers, self.options, self.facts, self.device_facts, self.warnings,
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Resolved) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Resolved({', '.join(f'{s.name}={s.value!r}' for s in self.settings().values() if s.changed)})"

    @property
    def step_prefill_tokens(self) -> int:
        """Prefill tokens of one step at most: the chunk size, or the context length where chunking is off (-1)."""
        chunk: int = self.chunked_prefill_size
        return self.context_length if chunk == -1 else chunk

    def values(self) -> dict[str, Any]:
        return dict(self._values)

    def as_options(self) -> EngineOptions:
        """Options that ask for exactly these values; resolving them again changes nothing."""
        return EngineOptions(**self._values)

    def settings(self) -> dict[str, Setting]:
        """Every setting with its history, in declared order."""
        return {name: self._setting(name) for name in OPTIONS}

    def _setting(self, name: str) -> Setting:
        option = OPTIONS[name]
        auto = f"unset: {option.auto}" if option.auto else "the default"
        history = [Step(option.default, "default", auto)]
        history += [Step(a.value, a.source, a.detail) for a in self.options.asked.get(name, ())]
        if not self.options.is_set(name) and len(history) > 1:
            history.append(Step(option.default, "default", "left to the rules"))
        history += self._layers.get(name, ())
        last = history[-1]
        asked = getattr(self.options, name) if self.options.is_set(name) else None
        return Setting(
            name=name, value=self._values[name], source=last.source, reason=last.reason, asked=asked,
            history=tuple(history),
        )  # fmt: skip


class ResolutionError(ConfigError):
    """Settings in conflict. `errors` lists all, `settings` names those of the first, `partial` shows how far it got."""

    def __init__(self, errors: Sequence[ConfigError], partial: Resolved) -> None:
        super().__init__(errors[0].message, remedy=errors[0].remedy)
        self.errors = tuple(errors)
        self.settings: tuple[str, ...] = getattr(errors[0], "settings", ())
        self.partial = partial


class _Layers:
    """What the passes have said so far, and the values that follow from it."""

    def __init__(self, options: EngineOptions, passes: Sequence[Pass]) -> None:
        self.asked = options.set_values()
        self.values: dict[str, Any] = {**_DEFAULTS, **self.asked}
        self.passes = passes
        self.by_field: dict[str, dict[int, Because]] = {}
        self.by_pass: dict[int, tuple[str, ...]] = {}

    def lift(self, index: int) -> None:
        """Takes the pass's word back, as far as values go."""
        for name in self.by_pass.pop(index, ()):
            del self.by_field[name][index]
            self._settle(name)

    def lay(self, index: int, answer: dict[str, Because]) -> None:
        fields = []
        for name, told in answer.items():
            if name in self.asked and told.value == self.asked[name] and not self.by_field.get(name):
                continue  # what the user set already is
            self.by_field.setdefault(name, {})[index] = told
            self._settle(name)
            fields.append(name)
        if fields:
            self.by_pass[index] = tuple(fields)

    def ordered(self, name: str) -> list[tuple[int, Because]]:
        """Fills first, then the rest, each in declared order; the last one has the say."""
        return sorted(self.by_field.get(name, {}).items(), key=lambda item: (not self.passes[item[0]].fills, item[0]))

    def _settle(self, name: str) -> None:
        words = self.by_field[name]
        if not words:
            self.values[name] = self.asked.get(name, _DEFAULTS[name])
        elif len(words) == 1:
            self.values[name] = next(iter(words.values())).value
        else:
            self.values[name] = self.ordered(name)[-1][1].value

    def snapshot(self) -> str:
        return repr(sorted((n, sorted(w.items())) for n, w in self.by_field.items() if w))


def resolve(
    options: EngineOptions,
    facts: ModelFacts,
    device: DeviceFacts,
    *,
    support: Support = THIS_VERSION,
    passes: Sequence[Pass] | None = None,
) -> Resolved:
    """Runs the passes to their fixed point. Raises `ResolutionError` (a `ConfigError`) where settings are in
    conflict."""
    if passes is None:
        passes = all_passes()
    layers = _Layers(options, passes)
    rejections = _run_to_fixed_point(layers, View(layers.values, options, facts, device, support), passes)
    told: dict[str, tuple[Step, ...]] = {
        name: tuple(Step(b.value, passes[i].name, b.reason) for i, b in layers.ordered(name))
        for name, words in layers.by_field.items()
        if words
    }
    adjusted = [n for n in layers.asked if n in told and layers.values[n] != layers.asked[n]]
    warnings = tuple(_warning(name, layers.asked[name], told[name][-1]) for name in adjusted)
    resolved = Resolved(layers.values, told, options, facts, device, warnings)
    if not rejections and warnings and layers.values["strict"]:
        rejections = [_refusal(name, layers.asked[name], told[name][-1]) for name in adjusted]
    if rejections:
        raise ResolutionError(rejections, resolved)
    return resolved


def all_passes() -> Sequence[Pass]:
    """The passes of `config.rules`, in declared order."""
    assert rules.__all__, "importing the rules registers them"
    return PASSES


def _run_to_fixed_point(layers: _Layers, view: View, passes: Sequence[Pass]) -> list[ConfigError]:
    due = set(range(len(passes)))
    reads: list[set[str]] = [set() for _ in passes]
    rejected: dict[int, Conflict] = {}
    seen: set[str] = set()
    values = layers.values
    for round_number in range(2 * len(passes) + 3):
        moved: list[str] = []
        for index, current in enumerate(passes):
            if index not in due:
                continue
            due.discard(index)
            before = {name: values[name] for name in layers.by_pass.get(index, ())}
            layers.lift(index)
            reads[index] = set()
            object.__setattr__(view, "_reads", reads[index])
            rejected.pop(index, None)
            try:
                answer = current(view)
            except Conflict as conflict:
                rejected[index] = conflict
                answer = {}
            for name in answer:
                before.setdefault(name, values[name])
            layers.lay(index, answer)
            changed = [name for name, old in before.items() if values[name] != old]
            if changed:
                moved.append(current.name)
                due.update(i for i, read in enumerate(reads) if i != index and not read.isdisjoint(changed))
        if not due:
            return [rejected[index] for index in sorted(rejected)]
        if round_number:
            state = layers.snapshot()
            if state in seen:
                break
            seen.add(state)
    raise PassError(f"these passes undo each other's work and never settle: {', '.join(moved)}")


def _warning(name: str, asked: Any, last: Step) -> str:
    return f"{name}: {show(asked)} -> {show(last.value)}, because {last.reason} ({last.source})"


def _refusal(name: str, asked: Any, last: Step) -> Conflict:
    return Conflict(
        name, "strict",
        message=f"{name} {show(asked)} would become {show(last.value)}, because {last.reason} ({last.source}).",
        remedy=f"Set {OPTIONS[name].flag} to {show(last.value)}, or leave out --strict.",
    )  # fmt: skip


def show(value: Any) -> str:
    """A value as people write it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value) or "none"
    return str(value)


def log_warnings(resolved: Resolved) -> None:
    """One line on the log for each setting of the user's that was changed."""
    for warning in resolved.warnings:
        logger.warning("%s", warning)
