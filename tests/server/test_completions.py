"""/v1/completions against the model whose answers are known."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from tests.server.chain import CHAIN, CONTEXT, NOISE, chain_bytes, chain_text
from tests.tiny import EOS_ID, VOCAB


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE] and hold nothing but data lines."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return events(http.post("/v1/completions", json={"temperature": 0, **body, "stream": True}))


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, str | None]:
    """(text, finish reason) of one choice; checks that exactly one chunk finishes it, the last one, with no text."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    reasons = [choice["finish_reason"] for choice in own]
    assert reasons.count(None) == len(own) - 1 and reasons[-1] is not None and own[-1]["text"] == ""
    return "".join(choice["text"] for choice in own), reasons[-1]


def test_the_shape_of_an_answer(http: httpx.Client) -> None:
    answer = complete(http, prompt="hello.", max_tokens=5)
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion" and answer["model"] == "chain"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "a😀", "length")
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_max_tokens_is_16_unless_given(http: httpx.Client) -> None:
    assert complete(http, prompt=".")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("count", range(1, 14))
def test_a_cut_inside_a_character_gives_the_same_text_streamed_or_not(http: httpx.Client, count: int) -> None:
    whole = complete(http, prompt=".", max_tokens=count)["choices"][0]["text"]
    text, reason = joined(streamed(http, prompt=".", max_tokens=count))
    assert text == whole == chain_text(count) and "\ufffd" not in whole and reason == "length"


def test_characters_never_break_across_chunks(http: httpx.Client) -> None:
    chunks = streamed(http, prompt=".", max_tokens=2 * len(CHAIN.encode()))
    assert joined(chunks)[0] == CHAIN * 2
    assert [c["choices"][0]["text"] for c in chunks][:5] == ["a", "😀", "b", "中", "c"]


def test_the_four_shapes_of_a_prompt(http: httpx.Client) -> None:
    for prompt in (".", [46], ["."], [[46]]):
        assert complete(http, prompt=prompt, max_tokens=1)["choices"][0]["text"] == "a"


def test_several_prompts_with_n_are_numbered_prompt_by_prompt(http: httpx.Client) -> None:
    for prompts in (["xL", "xyM", "N"], [[120, 76], [120, 121, 77], [78]]):
        answer = complete(http, prompt=prompts, n=2, max_tokens=2, echo=True)
        texts = ["xLMN", "xLMN", "xyMNO", "xyMNO", "NOP", "NOP"]
        assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(texts))
        assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 12
        chunks = streamed(http, prompt=prompts, n=2, max_tokens=2, echo=True)
        assert [joined(chunks, i)[0] for i in range(6)] == texts


def test_n_answers_are_complete_and_different_and_a_seed_repeats_them(http: httpx.Client) -> None:
    body = {"prompt": "x", "n": 4, "max_tokens": 12, **NOISE, "seed": 7}
    runs = [[c["text"] for c in complete(http, **body)["choices"]] for _ in range(2)]
    chunks = streamed(http, **body)
    assert runs[0] == runs[1] == [joined(chunks, i)[0] for i in range(4)] and len(set(runs[0])) == 4
    unseeded = [complete(http, **{**body, "seed": None})["choices"][0]["text"] for _ in range(3)]
    assert len(set(unseeded)) > 1


def test_n_answers_of_different_lengths_each_end_by_themselves(http: httpx.Client) -> None:
    bias = {**NOISE["logit_bias"], "257": 17}
    body = {"prompt": "x", "n": 6, "max_tokens": 40, "temperature": 5, "logit_bias": bias, "seed": 1}
    whole = [(c["text"], c["finish_reason"]) for c in complete(http, **body)["choices"]]
    chunks = streamed(http, **body)
    assert [joined(chunks, i) for i in range(6)] == whole
    assert len({len(text) for text, _ in whole}) > 2 and "stop" in {reason for _, reason in whole}


@pytest.mark.parametrize("text", [".", "é中😀."])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_echo_with_logprobs_covers_prompt_and_answer(http: httpx.Client, text: str, max_tokens: int) -> None:
    ids = list(text.encode())
    lists = []
    for prompt in (text, ids):
        answer = complete(http, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens)
        (choice,) = answer["choices"]
        said = choice["text"]
        assert said == text + chain_text(max_tokens) and answer["usage"]["completion_tokens"] == max_tokens
        found = choice["logprobs"]
        count = len(ids) + max_tokens
        assert [len(found[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [count] * 4
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert all(value <= 0 for value in found["token_logprobs"][1:])
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert said[offset] == token
        streamed_lists: dict[str, list[Any]] = {key: [] for key in found}
        for chunk in streamed(http, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens):
            for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
                streamed_lists[key] += values
        assert streamed_lists == found
        lists.append(found)
    assert lists[0] == lists[1]


def test_logprobs_are_the_models(http: httpx.Client) -> None:
    """The successor's logit is sqrt(V) (a unit vector after RMS norm), all others' are 0."""
    top = math.sqrt(VOCAB)
    expected = top - math.log(math.exp(top) + VOCAB - 1)
    for temperature in (0, 0.5, 1):
        found = complete(http, prompt=".", logprobs=3, max_tokens=1, temperature=temperature)["choices"][0]["logprobs"]
        assert found["tokens"] == ["a"] and found["token_logprobs"][0] == pytest.approx(expected, abs=1e-3)
        assert (
            len(found["top_logprobs"][0]) == 3 and max(found["top_logprobs"][0].values()) == found["token_logprobs"][0]
        )
    assert complete(http, prompt=".", logprobs=0, max_tokens=1)["choices"][0]["logprobs"]["top_logprobs"][0].keys() == {
        "a"
    }


def test_prompt_logprobs_come_as_a_list_of_their_own(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "xLM", "prompt_logprobs": 1, "max_tokens": 1}
    (choice,) = complete(http, **body)["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert (
        first is None and str(ord("L")) in second and third == {"77": {**third["77"], "rank": 1, "decoded_token": "M"}}
    )
    assert choice["text"] == "N"
    chunks = streamed(http, **body)
    assert [c["choices"][0]["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c["choices"][0]] == [
        choice["prompt_logprobs"]
    ]


def test_max_tokens_zero_is_for_echo_alone(http: httpx.Client) -> None:
    answer = complete(http, prompt="hello", max_tokens=0, echo=True)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("hello", "length")
    assert joined(streamed(http, prompt="hello", max_tokens=0, echo=True)) == ("hello", "length")
    refused = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("stop,kept", [("OPQ", "OPQ"), (["zzz", "NO", "M"], "M"), ("中", "中"), (["PQR."], "PQR.")])
def test_stop_strings_across_tokens(http: httpx.Client, stop: Any, kept: str) -> None:
    before = CHAIN[: CHAIN.index(kept)]
    for include in (False, True):
        body = {"prompt": ".", "max_tokens": 60, "stop": stop, "include_stop_str_in_output": include}
        (choice,) = complete(http, **body)["choices"]
        expected = before + kept if include else before
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", kept)
        assert joined(streamed(http, **body)) == (expected, "stop")


def test_text_held_back_for_a_stop_that_doesnt_come_is_sent(http: httpx.Client) -> None:
    body = {"prompt": ".", "max_tokens": 19, "stop": "PQXX"}
    assert complete(http, **body)["choices"][0]["text"] == joined(streamed(http, **body))[0] == chain_text(19)


def test_the_end_token_stops_and_isnt_shown(http: httpx.Client) -> None:
    answer = complete(http, prompt="!", max_tokens=5)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1
    assert joined(streamed(http, prompt="!", max_tokens=5)) == ("", "stop")
    ignored = complete(http, prompt="!", max_tokens=4, ignore_eos=True)["choices"][0]
    assert (ignored["text"], ignored["finish_reason"]) == ("a" + chain_text(3)[1:], "length")
    shown = complete(http, prompt="!", max_tokens=2, ignore_eos=True, skip_special_tokens=False)["choices"][0]
    assert shown["text"] == "<|eos|>a"


def test_stop_token_ids_and_min_tokens(http: httpx.Client) -> None:
    (choice,) = complete(http, prompt=".", max_tokens=40, stop_token_ids=[ord("b")])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a😀", "stop", ord("b"))
    (choice,) = complete(http, prompt=".", max_tokens=40, stop="b", min_tokens=10)["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"] == CHAIN + "a😀"


def test_logit_bias_takes_only_ids_of_the_vocabulary(http: httpx.Client) -> None:
    assert complete(http, prompt=".", logit_bias={"90": 100}, max_tokens=3)["choices"][0]["text"] == "ZZZ"
    assert complete(http, prompt=".", logit_bias={str(VOCAB - 1): -100}, max_tokens=1)["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    "size,count,fits",
    [(4000, 95, True), (4000, 96, True), (4000, 97, False), (4095, 1, True), (4096, 1, False), (5000, 1, False)],
)
def test_the_context_is_kept_to_the_token(http: httpx.Client, size: int, count: int, fits: bool) -> None:
    response = http.post("/v1/completions", json={"prompt": [65] * size, "max_tokens": count, "temperature": 0})
    if fits:
        assert response.json()["usage"]["completion_tokens"] == count
    else:
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "context_length_exceeded"
        assert str(size) in error["message"] and str(CONTEXT) in error["message"]


def test_usage_arrives_once_if_asked(http: httpx.Client) -> None:
    chunks = streamed(http, prompt=["ab", "c"], max_tokens=2, stream_options={"include_usage": True})
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 3 + 4
    assert all("usage" not in c for c in streamed(http, prompt="ab", max_tokens=2))


def test_null_is_absent(http: httpx.Client) -> None:
    fields = (
        "model max_tokens n temperature top_p stop seed stream stream_options presence_penalty frequency_penalty "
        "logit_bias response_format user metadata top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids "
        "suffix best_of include_stop_str_in_output skip_special_tokens prompt_logprobs echo logprobs"
    ).split()
    together = http.post("/v1/completions", json={"prompt": "x", **dict.fromkeys(fields)})
    assert together.status_code == 200 and together.json()["usage"]["completion_tokens"] == 16
    for field in fields:
        one = http.post("/v1/completions", json={"prompt": ".", "temperature": 0, "max_tokens": 2, field: None})
        assert one.status_code == 200, field
    for stop in (None, [], "b", ["b"]):
        text = complete(http, prompt=".", max_tokens=8, stop=stop)["choices"][0]["text"]
        assert text == ("a😀" if stop else chain_text(8))


def test_fields_without_a_meaning_here_are_named(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1, "user": "u", "bootstrap_host": "h", "dp_rank": 3, "data\r\nx": 1, "ü": 2}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-stenograph-ignored-fields"] == "bootstrap_host, dp_rank, ?, ?"
    assert (
        "x-stenograph-ignored-fields" not in http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).headers
    )


def test_a_prompt_of_nan_fails_alone(http: httpx.Client) -> None:
    bad = http.post("/v1/completions", json={"prompt": [1, VOCAB - 1], "max_tokens": 4})
    assert bad.status_code == 500 and "NaN" in bad.json()["error"]["message"]
    assert bad.json()["error"]["type"] == "server_error"
    stream = http.post("/v1/completions", json={"prompt": [[46], [1, VOCAB - 1]], "max_tokens": 200, "stream": True})
    assert "NaN" in stream.text and "[DONE]" not in stream.text
    assert complete(http, prompt=".", max_tokens=2)["choices"][0]["text"] == chain_text(2)


def test_tokens_after_the_tokenizers_last_are_no_text(http: httpx.Client) -> None:
    answer = complete(http, prompt=".", logit_bias={str(VOCAB - 2): 100}, max_tokens=2)
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 2


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "é!", "return_token_strs": True}).json()
    assert found == {
        "tokens": [0xC3, 0xA9, 33], "count": 3, "max_model_len": CONTEXT,
        "token_strs": ["bytes:\\xc3", "bytes:\\xa9", "!"],
    }  # fmt: skip
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "é!"}
    assert http.post("/detokenize", json={"tokens": [EOS_ID, 33]}).json() == {"prompt": "<|eos|>!"}
    assert http.post("/detokenize", json={"tokens": [EOS_ID, 33], "skip_special_tokens": True}).json() == {
        "prompt": "!"
    }
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_chain_helper_agrees_with_itself() -> None:
    assert chain_bytes(3, after="L") == b"MNO" and chain_text(2, after="?") == "LM" and chain_text(3, after="a") == ""
