"""Mistral: Llama's layer; attention sees a sliding window where config.json sets one."""

from stenograph.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
