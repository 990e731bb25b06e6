"""The size of a KV page."""

from __future__ import annotations

from typing import Any

from stenograph.config.options import PAGE_SIZES
from stenograph.config.passes import Conflict, View, because, register_post_process
from stenograph.config.rules.attention import BACKEND_FIELDS, backends_in_use, fa4_forces

_SMALL_TABLE = 1024
_LEAST = 16


@register_post_process(fills=True)
def page_size_default(view: View) -> dict[str, Any]:
    """Fills page_size: of the sizes that both backends accept the smallest (small pages share prefixes best) of at
    least 16 tokens that keeps a request's row of the page table within 1024 entries."""
    if not view.is_default("page_size"):
        return {}
    topk, context = view.speculative_eagle_topk, view.context_length
    if context is None:
        return {}  # not filled yet
    sizes = set(PAGE_SIZES)
    for caps in backends_in_use(view):
        sizes &= set(caps.pages(topk))
    cap = view.max_total_tokens
    if cap is not None:
        sizes = {size for size in sizes if size <= cap} or sizes
    if not sizes:
        return {"page_size": because(1, "the backends share no page size")}
    accepted = sorted(sizes)
    wide = [size for size in accepted if size >= _LEAST] or [accepted[-1]]
    size = next((size for size in wide if -(-context // size) <= _SMALL_TABLE), wide[-1])
    return {
        "page_size": because(
            size, f"the smallest in use that keeps the page table at {-(-context // size)} entries a request"
        )
    }


@register_post_process
def fa4_page_constraint(view: View) -> dict[str, Any]:
    """Sets page_size to 128 where fa4 is any of the three backend settings, on sm100, outside MLA, with top-k at most
    1, whatever the prefill graph backend is."""
    if fa4_forces(view, page_of_128=True) and any(getattr(view, name) == "fa4" for name in BACKEND_FIELDS):
        return {"page_size": because(128, "FA4 on sm100 reads the KV cache in 128-token pages")}
    return {}


@register_post_process
def fa4_tree(view: View) -> dict[str, Any]:
    """Sets page_size to 1 where fa4_page_constraint would apply but for a draft tree (top-k above 1)."""
    if fa4_forces(view, page_of_128=False) and any(getattr(view, name) == "fa4" for name in BACKEND_FIELDS):
        return {"page_size": because(1, "FA4's two-pass cascade over a draft tree needs 1-token pages")}
    return {}


@register_post_process
def page_fits_pool(view: View) -> dict[str, Any]:
    """Rejects a KV cache (max_total_tokens) that doesn't hold one page."""
    size, cap = view.page_size, view.max_total_tokens
    if size is not None and cap is not None and cap < size:
        raise Conflict(
            "max_total_tokens", "page_size", message=f"{cap} tokens are less than one page of {size}.",
            remedy=f"Set --max-total-tokens to {size} or more, or a smaller --page-size.",
        )  # fmt: skip
    return {}
