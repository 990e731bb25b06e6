"""How many bytes things take: the one arithmetic that `steno plan` and the engine's start share. No torch in here.

Weights are counted exactly from a model's shape; the engine replaces the count by what loading really took.
Activations, workspaces and graphs are estimates until the engine has measured them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stenograph.config.facts import ModelFacts
from stenograph.memory.budget import human_bytes as human_bytes
from stenograph.memory.budget import pages_that_fit as pages_that_fit

MIB: Final = 1 << 20
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_CONTEXT_BYTES: Final = 600 * MIB  # the CUDA context, loaded kernels and matrix libraries' workspaces
_WORKSPACE_BYTES: Final = 256 * MIB  # partial results of attention kernels that split the KV sequence
_GRAPH_BYTES: Final = 3 * MIB // 2  # what the driver keeps for one recorded graph of some hundred kernels
_LINEAR_BYTES: Final = {  # bytes a weight of a linear layer, scales included
    "fp8": 1 + 4 / 128**2, "awq": 0.5 + 2.5 / 128, "gptq": 0.5 + 2.5 / 128, "mxfp4": 0.5 + 1 / 32,
    "bitsandbytes": 0.5 + 4 / 64, "compressed-tensors": 1.0, "gguf": 20 / 32,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Weights of one rank: of linear layers (which quantisation shrinks), of embedding and head, of norms and
    biases."""

    linear: int
    embedding: int
    small: int

    @property
    def total(self) -> int:
        return self.linear + self.embedding + self.small


def count_parameters(facts: ModelFacts, tp_size: int = 1) -> ParameterCount:
    """Exact for one rank; with tensor parallelism the largest rank's share."""
    hidden, heads = facts.hidden_size, facts.num_heads

    def part(size: int) -> int:
        return -(-size // tp_size)

    if facts.mla:
        m = facts.mla
        query = heads * (m.nope_head_dim + m.rope_head_dim)
        attention = hidden * part(query) if m.q_lora_rank is None else m.q_lora_rank * (hidden + part(query))
        attention += hidden * (m.kv_lora_rank + m.rope_head_dim)
        attention += (
            m.kv_lora_rank * part(heads * (m.nope_head_dim + m.v_head_dim)) + part(heads * m.v_head_dim) * hidden
        )
        attention_small = (m.q_lora_rank or 0) + m.kv_lora_rank
    else:
        query = part(heads) * facts.head_dim
        key = max(1, part(facts.num_kv_heads)) * facts.head_dim
        attention = hidden * (2 * query + 2 * key)
        attention_small = (
            (query + 2 * key) * facts.qkv_bias + hidden * facts.o_bias + 2 * facts.head_dim * facts.qk_norm
        )
    dense = 3 * hidden * part(facts.intermediate_size)
    dense_small = (2 * part(facts.intermediate_size) + hidden) * facts.mlp_bias
    norms = (4 if facts.model_type.startswith("gemma3") else 2) * hidden
    moe_layers, moe, moe_small = 0, 0, 0
    if facts.moe:
        e = facts.moe
        moe_layers = facts.num_layers - e.first_dense_layers
        moe = 3 * hidden * part(e.intermediate_size) * (e.num_experts + e.shared_experts)
        moe_small = e.num_experts * hidden
    layers = facts.num_layers
    return ParameterCount(
        linear=layers * attention + (layers - moe_layers) * dense + moe_layers * moe,
        embedding=part(facts.vocab_size) * hidden * (1 if facts.tie_embeddings else 2),
        small=layers * (attention_small + norms)
        + (layers - moe_layers) * dense_small
        + moe_layers * moe_small
        + hidden,
    )


def weight_bytes(facts: ModelFacts, *, dtype: str, quantization: str = "none", tp_size: int = 1) -> int:
    """Bytes of the weights of one rank."""
    count = count_parameters(facts, tp_size)
    size = DTYPE_BYTES[dtype]
    return int(count.linear * _LINEAR_BYTES.get(quantization, size)) + (count.embedding + count.small) * size


DENSE_COPY = 4
"""Packed weights keep a dense bfloat16 copy for steps of many tokens, where that takes at most one part in so many of
main memory; else the packed weights serve every step, more slowly."""


def dense_copy_bytes(
    facts: ModelFacts, *, dtype: str, quantization: str, memory_bytes: int, tp_size: int = 1
) -> int:
    """Bytes of that copy on one rank, on a CPU; 0 where none is kept."""
    if dtype != "bfloat16" or quantization != "gguf":
        return 0
    copy = int(count_parameters(facts, tp_size).linear) * DTYPE_BYTES[dtype]
    return copy if copy * tp_size <= memory_bytes // DENSE_COPY else 0


def kv_bytes_per_token(facts: ModelFacts, *, kv_dtype: str, tp_size: int = 1) -> int:
    """Bytes of KV cache that one token takes on one rank, over all layers."""
    return facts.kv_bytes_per_token(DTYPE_BYTES[kv_dtype], tp_size)


def activation_bytes(facts: ModelFacts, *, dtype: str, tokens: int, requests: int, tp_size: int = 1) -> int:
    """Most bytes alive at once in a step of `tokens` tokens that gives logits to `requests` rows."""
    size = DTYPE_BYTES[dtype]
    query = facts.num_heads * facts.head_dim
    key = facts.num_kv_heads * facts.head_dim if not facts.mla else query
    attention = 2 * query + 2 * key
    mlp = 3 * facts.intermediate_size
    if facts.moe:
        routed = facts.moe.experts_per_token * (facts.hidden_size * tp_size + 3 * facts.moe.intermediate_size)
        mlp = max(
            mlp if facts.moe.first_dense_layers else 0,
            routed + 3 * facts.moe.intermediate_size * facts.moe.shared_experts,
        )
    in_layer = tokens * (3 * facts.hidden_size + max(attention, mlp) // tp_size) * size
    at_head = tokens * facts.hidden_size * size + min(requests, tokens) * facts.vocab_size * (
        size + 8
    )  # float32, sorted
    return max(in_layer, at_head)


def workspace_bytes(*, requests: int, context_length: int, page_size: int, on_gpu: bool) -> int:
    """Page tables and request state, and on a GPU the attention kernels' workspace and the CUDA context."""
    tables = requests * -(-context_length // page_size) * 4
    return tables + (_WORKSPACE_BYTES + _CONTEXT_BYTES if on_gpu else 0)


def graph_bytes(
    facts: ModelFacts, *, dtype: str, batch_sizes: Sequence[int], prefill_tokens: Sequence[int], tp_size: int = 1
) -> tuple[int, int]:
    """(least, most) bytes of the recorded graphs, which share one pool. Least: what the driver keeps for each; most:
    twice that, and the largest bucket's activations kept for good."""
    count = len(batch_sizes) + len(prefill_tokens)
    if not count:
        return 0, 0
    least = int(count * _GRAPH_BYTES * max(1.0, facts.num_layers / 32))
    largest = max((*batch_sizes, *prefill_tokens))
    rows = max(batch_sizes, default=1)
    return least, 2 * least + activation_bytes(facts, dtype=dtype, tokens=largest, requests=rows, tp_size=tp_size)


def reserve_bytes(free: int) -> int:
    """What stays unused of so much free device memory, where no fraction was asked for: room for fragmentation."""
    return min(1 << 30, free // 25)


def kv_budget_bytes(
    *, total: int, fraction: float, weights: int, elsewhere: int, on_gpu: bool, tp_size: int = 1
) -> int:
    """Bytes left for the KV cache of one rank. `elsewhere` is activations, workspaces and graphs.

    On a GPU the fraction covers all that the engine takes. On a CPU it is the share of what the weights leave, since
    other programs live in the same memory, and all ranks share it.
    """
    if on_gpu:
        return int(total * fraction) - weights - elsewhere
    return int((total - weights * tp_size) * fraction) // tp_size - elsewhere


DECODE_COPY = 2
"""On a CPU, the rows that decode are kept side by side in a copy: up to one part in so many of the KV cache."""


def budget_page_bytes(page_bytes: int, *, on_gpu: bool) -> int:
    """What a page takes of the budget: itself and, on a CPU, its share of the copy for rows that decode."""
    return page_bytes if on_gpu else page_bytes + page_bytes // DECODE_COPY


def wanted_pages(
    *, page_size: int, max_running_requests: int, context_length: int, max_total_tokens: int | None = None
) -> int:
    """Most pages of KV cache that are of use, the padding page (0) included: what all running requests at full length
    fill, and no more than `max_total_tokens`; at least one page beside the padding page."""
    pages = max_running_requests * -(-context_length // page_size)
    if max_total_tokens is not None:
        pages = min(pages, max_total_tokens // page_size)
    return max(1, pages) + 1
