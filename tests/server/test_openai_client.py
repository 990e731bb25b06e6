"""The official client's calls: sync, async, streams."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from tests.server.chain import CHAIN, chain_text
from tests.server.conftest import ServerProcess

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "chain" and client.models.retrieve("chain") == card


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chain", messages=MESSAGES, temperature=0, max_completion_tokens=8, logprobs=True, top_logprobs=2,
        user="me", metadata={"a": "b"}, seed=1, n=1, stop=["\n"], presence_penalty=0, logit_bias={"90": -1},
        extra_body={"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0},
    )  # fmt: skip
    assert answer.choices[0].message.content == chain_text(8) and answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.content or []) == 8
    assert answer.usage and answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details and answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="chain",
        messages=MESSAGES,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chain_text(30)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 30


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="chain", messages=MESSAGES, temperature=0, stop="PQ") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and kinds.count("content.done") == 1
    assert final.choices[0].message.content == CHAIN[: CHAIN.index("PQ")]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="chain", prompt=[".", "a"], temperature=0, max_tokens=9, n=1, echo=True, logprobs=1
    )
    assert [c.text for c in answer.choices] == ["." + chain_text(9), "a" + chain_text(9, after="a")]
    assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.tokens or []) == 10
    stream = client.completions.create(model="chain", prompt=".", temperature=0, max_tokens=9, stream=True)
    assert "".join(c.choices[0].text for c in stream) == chain_text(9)


def test_raw_response_and_request_id(client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "mine-1"}
    raw = client.chat.completions.with_raw_response.create(
        model="chain", messages=MESSAGES, max_tokens=1, extra_headers=headers, extra_body={"mystery": 1}
    )
    assert raw.request_id == "mine-1" and raw.headers["x-stenograph-ignored-fields"] == "mystery"
    assert len(client.models.list()._request_id or "") == 32


def test_async_calls_at_once(server: ServerProcess) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def stream(count: int) -> str:
                chunks = await client.chat.completions.create(
                    model="chain", messages=MESSAGES, temperature=0, max_tokens=count, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in chunks])

            async def whole(count: int) -> str:
                answer = await client.completions.create(model="chain", prompt=".", temperature=0, max_tokens=count)
                return answer.choices[0].text

            counts = range(20, 60)
            texts = await asyncio.gather(*(f(c) for c in counts for f in (stream, whole)))
            assert texts == [chain_text(c) for c in counts for _ in range(2)]

    asyncio.run(main())
    server.wait_idle()


def test_the_openapi_document_is_complete(server: ServerProcess) -> None:
    document = httpx.get(server.url + "/openapi.json", trust_env=False).json()
    text = str(document)
    assert "$defs" not in text
    names = {part.split("'")[0] for part in text.split("'#/components/schemas/")[1:]}
    assert names <= document["components"]["schemas"].keys() and "ChatCompletionRequest" in names
    assert document["paths"]["/v1/completions"]["post"]["requestBody"]["required"]
