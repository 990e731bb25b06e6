"""Qwen 3 (dense): Llama's layer with each query and key head normalised before the rotation."""

from stenograph.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    pass
