"""How many requests run, how prompts are cut, and what overlaps or is shared."""

from __future__ import annotations

from typing import Any

from stenograph.config.passes import View, because, register_post_process


@register_post_process(fills=True)
def max_running_default(view: View) -> dict[str, Any]:
    """Fills max_running_requests: 256 on a GPU, 64 on a CPU; 64 and 16 with speculation, where each request takes a
    whole tree of draft tokens a step; never more than the KV cache has pages (max_total_tokens)."""
    if not view.is_default("max_running_requests"):
        return {}
    gpu = view.device.kind == "cuda"
    if view.speculative_algorithm is not None:
        tokens = view.speculative_num_draft_tokens
        count, reason = (64 if gpu else 16), f"with speculation each request takes {tokens} tokens of every step"
    else:
        count, reason = (256, "enough to fill a GPU") if gpu else (64, "enough to fill a CPU")
    pages = _pages(view)
    if pages is not None and pages < count:
        count, reason = pages, f"max_total_tokens makes {pages} pages, and each request needs one"
    return {"max_running_requests": because(count, reason)}


@register_post_process
def max_running_pages(view: View) -> dict[str, Any]:
    """Adjusts max_running_requests to the pages of the KV cache where max_total_tokens makes fewer."""
    pages, asked = _pages(view), view.asked("max_running_requests")
    if pages is not None and asked is not None and asked > pages:
        return {
            "max_running_requests": because(pages, f"max_total_tokens makes {pages} pages, and each request needs one")
        }
    return {}


def _pages(view: View) -> int | None:
    if view.max_total_tokens is None or view.page_size is None:
        return None
    return max(1, int(view.max_total_tokens // view.page_size))


@register_post_process(fills=True)
def chunk_default(view: View) -> dict[str, Any]:
    """Fills chunked_prefill_size: 8192 tokens on a GPU, 512 on a CPU, no more than the context or max_total_tokens."""
    if not view.is_default("chunked_prefill_size"):
        return {}
    most = 8192 if view.device.kind == "cuda" else 512
    size = min(most, view.context_length or most, view.max_total_tokens or most)
    if size == most:
        reason = "fills a GPU and still lets decode in often" if most == 8192 else "keeps decode's waits short on a CPU"
    else:
        reason = "the context length" if size == view.context_length else "max_total_tokens"
    return {"chunked_prefill_size": because(size, reason)}


@register_post_process
def chunk_fits_pool(view: View) -> dict[str, Any]:
    """Adjusts a chunk that is larger than the whole KV cache (max_total_tokens) to its size. -1 (never cut) stays."""
    asked, cap = view.asked("chunked_prefill_size"), view.max_total_tokens
    if asked is not None and cap is not None and asked > cap:
        return {"chunked_prefill_size": because(cap, "the KV cache holds max_total_tokens")}
    return {}


@register_post_process(fills=True)
def overlap_default(view: View) -> dict[str, Any]:
    """Fills overlap_schedule: on wherever it can be."""
    if not view.is_default("overlap_schedule"):
        return {}
    why_not = _no_overlap(view)
    if why_not is None and "overlap_schedule" not in view.support.features:
        why_not = "not in this version yet"
    return {"overlap_schedule": because(why_not is None, why_not or "hides the host's work behind the GPU's")}


@register_post_process
def overlap_excluded(view: View) -> dict[str, Any]:
    """Adjusts overlap_schedule to off on a CPU (plan and step would fight for the same cores) and with n-gram drafts
    (the host needs each step's tokens to draft the next)."""
    why_not = _no_overlap(view)
    if why_not is not None and view.asked("overlap_schedule"):
        return {"overlap_schedule": because(False, why_not)}
    return {}


def _no_overlap(view: View) -> str | None:
    if view.device.kind == "cpu":
        return "on a CPU the plan and the step share the same cores"
    if view.speculative_algorithm == "ngram":
        return "n-gram drafts need each step's tokens on the host before the next"
    return None


@register_post_process(fills=True)
def prefix_cache_default(view: View) -> dict[str, Any]:
    """Fills prefix_cache: on wherever it can be."""
    if not view.is_default("prefix_cache"):
        return {}
    why_not = _no_prefix(view)
    if why_not is None and "prefix_cache" not in view.support.features:
        why_not = "not in this version yet"
    return {"prefix_cache": because(why_not is None, why_not or "prompts that begin alike share their pages")}


@register_post_process
def prefix_cache_excluded(view: View) -> dict[str, Any]:
    """Adjusts prefix_cache to off where a page holds the whole context, so that no full page can ever be shared."""
    why_not = _no_prefix(view)
    if why_not is not None and view.asked("prefix_cache"):
        return {"prefix_cache": because(False, why_not)}
    return {}


def _no_prefix(view: View) -> str | None:
    size, context = view.page_size, view.context_length
    if size is not None and context is not None and size >= context:
        return f"a page of {size} tokens holds the whole context ({context}): no full page is ever shared"
    return None
