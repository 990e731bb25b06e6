"""What `LLM` takes as prompts, messages and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stenograph import LLM, SamplingParams
from stenograph.errors import RequestError
from tests.tiny import save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(directory)
    llm = LLM(str(directory), dtype="float32", max_total_tokens=256, progress=False)
    yield llm
    llm.shutdown()


def test_token_ids_may_come_from_arrays_and_tensors(llm: LLM) -> None:
    expected = llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids
    for one in ((1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), np.int64(2)], iter([1, 2])):
        assert [o.outputs[0].token_ids for o in llm.generate(one, GREEDY)] == [expected]
    for two in (torch.tensor([[1, 2], [1, 2]]), [np.array([1, 2]), [1, 2]]):
        assert [o.outputs[0].token_ids for o in llm.generate(two, GREEDY)] == [expected] * 2


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"prompt": "a"}, [1.5], [None], ["a", 5], np.int64(5), [[[1]]]])
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user", "content": "x"}, ["hi"], [["hi"]], [[5]]])
def test_what_is_no_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("params", [5, "x", [None], {"max_tokens": 1}, []])
def test_what_are_no_parameters(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="param"):
        llm.generate("x", params)
