"""Passes: the named rules that turn what was asked into what will run. The registry, and what a pass may see and say.

    @register_post_process
    def fa4_page_constraint(view):
        \"\"\"What it does; the documentation quotes this.\"\"\"
        return {"page_size": because(128, "why")}

A pass is a pure function of the view. It has three ways to act, told apart by what it returns and how it is
registered:

- *fill*: `@register_post_process(fills=True)`: values for fields that nobody set. It lies below the other passes' word.
- *adjust*: a plain pass. Over a field that the user set it is a warning (with `strict` a refusal); over a filled one,
  a stronger fill.
- *reject*: `raise Conflict(...)`, naming the settings that don't go together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from stenograph.config.device import DeviceFacts
from stenograph.config.facts import ModelFacts
from stenograph.config.options import OPTIONS, EngineOptions
from stenograph.config.support import Support
from stenograph.errors import ConfigError


class Because(NamedTuple):
    """A value and the reason for it, as a pass returns them."""

    value: Any
    reason: str


def because(value: Any, reason: str) -> Because:
    return Because(value, reason)


class Conflict(ConfigError):
    """Settings that don't go together. `settings` names them; the message says why, the remedy what to change."""

    def __init__(self, *settings: str, message: str, remedy: str) -> None:
        super().__init__(f"{' and '.join(settings)}: {message}", remedy=remedy)
        self.settings = settings


class PassError(RuntimeError):
    """A pass broke the rules for passes, or passes undo each other's work: a defect of ours, not the user's."""


class View:
    """The settings as resolved so far, read-only: `view.page_size`. A pass never sees its own earlier word."""

    __slots__ = ("_asked", "_reads", "_values", "device", "facts", "support")

    facts: ModelFacts
    device: DeviceFacts
    support: Support

    def __init__(
        self, values: dict[str, Any], options: EngineOptions, facts: ModelFacts, device: DeviceFacts, support: Support
    ) -> None:
        put = object.__setattr__
        put(self, "_values", values)
        put(self, "_asked", options.set_values())
        put(self, "_reads", set())
        put(self, "facts", facts)
        put(self, "device", device)
        put(self, "support", support)

    def __getattr__(self, name: str) -> Any:
        try:
            value = self._values[name]
        except KeyError:
            raise AttributeError(f"no setting is named {name}") from None
        self._reads.add(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a view is read-only: return a dict of overrides instead")

    def is_default(self, name: str) -> bool:
        """True where the user left the field alone (whatever a pass made of it)."""
        if name not in OPTIONS:
            raise PassError(f"no setting is named {name}")
        return name not in self._asked

    def asked(self, name: str) -> Any:
        """The user's own value, before any pass; None where it was left alone."""
        return self._asked.get(name)

    def use_mla_backend(self) -> bool:
        return self.facts.mla is not None

    def is_sm90_supported(self) -> bool:
        return self.device.generation == 90

    def is_sm100_supported(self) -> bool:
        return self.device.generation == 100


PassFunction = Callable[[View], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    name: str
    run: PassFunction
    fills: bool
    doc: str

    def __call__(self, view: View) -> dict[str, Because]:
        """Runs it and checks what it returns; the reason defaults to the first sentence of its docstring."""
        answer = self.run(view)
        if not isinstance(answer, dict):
            raise PassError(f"pass {self.name} returned {type(answer).__name__}, not a dict of overrides")
        checked = {}
        for name, value in answer.items():
            declared = OPTIONS.get(name)
            if declared is None:
                raise PassError(f"pass {self.name} sets {name}, which is no setting")
            if self.fills and not view.is_default(name):
                raise PassError(f"pass {self.name} fills {name}, which the user has set")
            told = (
                value
                if isinstance(value, Because)
                else Because(value, self.doc.partition(". ")[0] or f"the rule {self.name}")
            )
            try:
                declared.check(told.value)
            except ConfigError as error:
                raise PassError(f"pass {self.name}: {error}") from error
            checked[name] = told
        return checked


PASSES: list[Pass] = []


@overload
def register_post_process(run: PassFunction) -> PassFunction: ...
@overload
def register_post_process(*, fills: bool) -> Callable[[PassFunction], PassFunction]: ...
def register_post_process(run: PassFunction | None = None, *, fills: bool = False) -> Any:
    """Adds a pass at the end of the declared order."""

    def register(function: PassFunction) -> PassFunction:
        PASSES.append(make_pass(function, fills=fills))
        return function

    return register if run is None else register(run)


def make_pass(function: PassFunction, *, fills: bool = False) -> Pass:
    name = getattr(function, "__name__", "")
    doc = " ".join((function.__doc__ or "").split())
    assert name, "a pass has a name, which is the source of what it sets"
    return Pass(name=name, run=function, fills=fills, doc=doc)
