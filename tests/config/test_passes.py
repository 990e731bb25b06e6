"""The contract of passes: what they may return, that they settle, and that a cycle is named."""

from __future__ import annotations

from typing import Any

import pytest

from stenograph.config.options import EngineOptions
from stenograph.config.passes import PASSES, Because, Conflict, Pass, PassError, View, because, make_pass
from stenograph.config.resolve import ResolutionError, Resolved, resolve
from stenograph.config.support import EVERYTHING
from tests.config.helpers import DEVICES, facts, settle


def run(*passes: Pass, **options: Any) -> Resolved:
    return resolve(
        EngineOptions.from_python(**options), facts("qwen3-8b"), DEVICES["h200"], support=EVERYTHING, passes=passes
    )


def a_pass(answer: Any, *, fills: bool = False, name: str = "a_pass") -> Pass:
    def function(view: View) -> Any:
        """A reason."""
        return answer(view) if callable(answer) else answer

    function.__name__ = name
    return make_pass(function, fills=fills)


@pytest.mark.parametrize(("answer", "message"), [
    (None, "NoneType"), ([("page_size", 1)], "list"), ({"page_sise": 1}, "page_sise"), ({"page_size": 3}, "page_size"),
    ({"attention_backend": "fa5"}, "fa5"), ({"tp_size": 0}, "tp_size"), ({"port": None}, "port"),
])  # fmt: skip
def test_wrong_answers_are_our_defect(answer: Any, message: str) -> None:
    with pytest.raises(PassError, match=rf"a_pass.*{message}"):
        run(a_pass(answer))


def test_a_fill_may_not_touch_what_the_user_set() -> None:
    with pytest.raises(PassError, match="page_size"):
        run(a_pass({"page_size": 16}, fills=True), page_size=1)


def test_view_is_read_only_and_knows_the_settings() -> None:
    def look(view: View) -> dict[str, Any]:
        assert view.page_size == 8 and not view.is_default("page_size") and view.is_default("port")
        assert view.is_sm90_supported() and not view.is_sm100_supported() and not view.use_mla_backend()
        with pytest.raises(AttributeError):
            view.page_size = 1
        with pytest.raises(AttributeError):
            _ = view.page_sise
        with pytest.raises(PassError):
            view.is_default("page_sise")
        return {}

    run(a_pass(look), page_size=8)


def test_fill_adjust_and_reason_are_recorded() -> None:
    resolved = run(
        a_pass({"page_size": 64}, fills=True, name="fill"), a_pass({"page_size": because(128, "why")}, name="force")
    )
    setting = resolved.settings()["page_size"]
    assert (setting.value, setting.source, setting.reason, setting.asked) == (128, "force", "why", None)
    assert [(s.value, s.source) for s in setting.history] == [(None, "default"), (64, "fill"), (128, "force")]
    assert setting.history[1].reason == "A reason."
    assert resolved.warnings == ()  # nobody's wish was changed


def test_adjusting_a_users_value_warns_and_strict_refuses() -> None:
    force = a_pass({"page_size": because(128, "it must")}, name="force")
    resolved = run(force, page_size=16)
    assert resolved.warnings == ("page_size: 16 -> 128, because it must (force)",)
    with pytest.raises(ResolutionError, match=r"page_size.*strict.*16.*128.*it must.*force"):
        run(force, page_size=16, strict=True)
    assert run(force, page_size=128, strict=True).settings()["page_size"].source == "python"


def test_passes_run_until_nothing_changes() -> None:
    early = a_pass(lambda v: {"tp_size": 2} if v.page_size == 64 else {}, fills=True, name="early")
    late = a_pass({"page_size": 64}, fills=True, name="late")
    assert run(early, late).tp_size == run(late, early).tp_size == 2


def test_a_rejection_that_a_later_pass_resolves_is_no_rejection() -> None:
    def check(view: View) -> dict[str, Any]:
        """Needs a page size."""
        if view.page_size is None:
            raise Conflict("page_size", "port", message="unset.", remedy="Set it.")
        return {}

    assert run(make_pass(check), a_pass({"page_size": 1}, fills=True)).page_size == 1
    with pytest.raises(ResolutionError, match=r"page_size and port: unset\. Set it"):
        run(make_pass(check))


def test_a_cycle_names_its_passes() -> None:
    ping = a_pass(lambda v: {"page_size": 1} if v.tp_size == 1 else {"page_size": 2}, name="ping")
    pong = a_pass(lambda v: {"tp_size": 2} if v.page_size == 1 else {"tp_size": 1}, name="pong")
    with pytest.raises(PassError, match=r"ping, pong|pong, ping"):
        run(ping, pong)


def test_all_conflicts_are_reported() -> None:
    with pytest.raises(ResolutionError) as caught:
        settle(tp_size=7, context_length=10**6, speculative_algorithm="eagle")
    found = {name for error in caught.value.errors for name in error.settings}  # type: ignore[attr-defined]
    assert {"tp_size", "context_length", "speculative_draft_model_path"} <= found
    assert caught.value.partial.page_size is not None


def test_real_passes_have_names_and_docstrings() -> None:
    names = [p.name for p in PASSES]
    assert len(set(names)) == len(names) > 20
    assert all(p.doc.endswith(".") or p.doc.endswith(")") for p in PASSES)
    assert isinstance(because(1, "x"), Because)
