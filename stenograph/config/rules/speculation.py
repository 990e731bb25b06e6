"""Speculative decoding. It resolves before attention, pages and memory, since they depend on the tree's shape."""

from __future__ import annotations

from typing import Any

from stenograph.config.passes import Conflict, View, because, register_post_process

_DEFAULT_TREE_TOKENS = 16
_NEEDS_DRAFT_MODEL = ("eagle", "eagle3")
_NUMBERS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def tree_capacity(steps: int, topk: int) -> int:
    """Tokens in the widest tree: the root, top-k after it, and top-k of each of top-k branches at every later step."""
    return 1 + topk + (steps - 1) * topk * topk


@register_post_process(fills=True)
def speculative_default(view: View) -> dict[str, Any]:
    """Fills draft steps, top-k and draft tokens together, so that they describe one tree: for EAGLE 3 steps, for
    n-grams 4, top-k 1 (a chain), and as many draft tokens as the tree holds, at most 16 where it branches."""
    algorithm = view.speculative_algorithm
    if algorithm is None:
        return {}
    asked_steps, asked_topk, asked_tokens = (view.asked(name) for name in _NUMBERS)
    topk = 1 if asked_topk is None else asked_topk
    steps = asked_steps
    if steps is None:
        steps = (
            asked_tokens - 1
            if asked_tokens and topk == 1 and 2 <= asked_tokens <= 65
            else 4
            if algorithm == "ngram"
            else 3
        )
    capacity = tree_capacity(steps, topk)
    filled = {
        "speculative_num_steps": because(steps, f"{algorithm}: {steps} draft steps"),
        "speculative_eagle_topk": because(topk, "a chain of drafts, which costs least to verify"),
        "speculative_num_draft_tokens": because(
            capacity if topk <= 1 else min(capacity, _DEFAULT_TREE_TOKENS),
            f"a tree of {steps} steps and top-k {topk} holds {capacity}",
        ),
    }
    return {name: value for name, value in filled.items() if view.is_default(name)}


@register_post_process
def speculative_unused(view: View) -> dict[str, Any]:
    """Adjusts speculative settings that have no effect to unset: all of them without speculative_algorithm, and the
    draft model with n-grams, which need none."""
    if view.speculative_algorithm is None:
        set_ones = [name for name in (*_NUMBERS, "speculative_draft_model_path") if view.asked(name)]
        return {name: because(None, "without speculative_algorithm it has no effect") for name in set_ones}
    if view.speculative_algorithm not in _NEEDS_DRAFT_MODEL and view.asked("speculative_draft_model_path"):
        return {"speculative_draft_model_path": because(None, "n-gram drafts come from the text, not from a model")}
    return {}


@register_post_process
def speculative_check(view: View) -> dict[str, Any]:
    """Rejects EAGLE without a draft model, a top-k of 0, n-grams that branch, and draft tokens that the tree of steps
    and top-k doesn't hold (with top-k 1 they are exactly steps + 1)."""
    algorithm = view.speculative_algorithm
    if algorithm is None:
        return {}
    if algorithm in _NEEDS_DRAFT_MODEL and view.speculative_draft_model_path is None:
        raise Conflict(
            "speculative_algorithm", "speculative_draft_model_path", message=f"{algorithm} needs a draft model.",
            remedy="Set --speculative-draft-model-path, or use --speculative-algorithm ngram.",
        )  # fmt: skip
    steps, topk, tokens = (getattr(view, name) for name in _NUMBERS)
    if topk == 0:
        raise Conflict(
            "speculative_eagle_topk", "speculative_algorithm", message="top-k 0 means no speculation.",
            remedy="Set top-k to 1 or more, or leave out --speculative-algorithm.",
        )  # fmt: skip
    if steps is None or topk is None or tokens is None:
        return {}  # not filled yet
    if algorithm == "ngram" and topk > 1:
        raise Conflict(
            "speculative_eagle_topk", "speculative_algorithm", message="n-gram drafts are a chain: top-k is 1.",
            remedy="Leave --speculative-eagle-topk unset.",
        )  # fmt: skip
    capacity = tree_capacity(steps, topk)
    if topk == 1 and tokens != steps + 1:
        raise Conflict(
            "speculative_num_draft_tokens", "speculative_num_steps",
            message=f"with top-k 1 and {steps} steps there are exactly {steps + 1} draft tokens, not {tokens}.",
            remedy=f"Set --speculative-num-draft-tokens {steps + 1}, or leave it unset.",
        )  # fmt: skip
    if not 2 <= tokens <= capacity:
        raise Conflict(
            "speculative_num_draft_tokens", "speculative_eagle_topk",
            message=f"a tree of {steps} steps and top-k {topk} holds from 2 to {capacity} draft tokens, not {tokens}.",
            remedy=f"Set --speculative-num-draft-tokens to {capacity} or less, or leave it unset.",
        )  # fmt: skip
    return {}
