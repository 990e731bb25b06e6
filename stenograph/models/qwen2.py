"""Qwen 2 and 2.5: Llama's layer with a bias on queries, keys and values."""

from stenograph.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
