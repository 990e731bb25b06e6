"""Whatever is sent, the answer is an OpenAI-shaped error with the right status, and the server goes on as before."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.chain import POISON, chain_text
from tests.server.conftest import ServerProcess
from tests.tiny import VOCAB

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module", autouse=True)
def alive(server: ServerProcess) -> Iterator[None]:
    """The same process, healthy, with its known answer and all its pages, after everything in here."""
    pids = (server.process.pid, server.engine_pid())
    yield
    server.wait_idle()
    assert pids == (server.process.pid, server.engine_pid())
    with server.client() as client:
        assert client.get("/health").status_code == 200
        body = {"prompt": ".", "max_tokens": 8, "temperature": 0}
        assert client.post(TEXT, json=body).json()["choices"][0]["text"] == chain_text(8)


def check(response: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert isinstance(message, str) and 0 < len(message) <= 1100
    assert "Traceback" not in message and ".py" not in message and "/tmp" not in message and "\n" not in message
    if param is not None:
        assert body["error"]["param"] == param, message
    error: dict[str, Any] = body["error"]
    return error


def post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Like `json=`, but NaN and the like go out as they are."""
    base = {"prompt": "x"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    return http.post(path, content=json.dumps({**base, **body}), headers={"content-type": "application/json"})


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_none(http: httpx.Client, path: str, name: str) -> None:
    for value in (float("nan"), float("inf"), float("-inf"), -2.5, "0.5", True, [1], {}, 10**400):
        check(post(http, path, {name: value}), param=name)
    raw = '{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "' + name + '": 1e400}'
    check(http.post(path, content=raw, headers={"content-type": "application/json"}), param=name)


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "name,values",
    [
        ("top_p", [0, 1.001]),
        ("min_p", [1.5]),
        ("presence_penalty", [2.1]),
        ("repetition_penalty", [0]),
        ("n", [0, -1, 129, 10**6, 2**63, 10**400, 1.5, "2", True]),
        ("max_tokens", [0, -1, 10**4, 10**9, 2**63, 10**400, 1.0, "5", True]),
        ("min_tokens", [-1, 10**9, 10**400]),
        ("top_k", [-2, 1.5, "5"]),
        ("seed", [2**63, -(2**63) - 1, 1.5, "a", True, 10**400]),
        ("stop", ["", [""], ["a", ""], [1], 5, {}, ["x"] * 33, "x" * 1025]),
        ("stop_token_ids", [[-1], [VOCAB], ["a"], [True], [1.5], 3, [10**400], [1] * 1025]),
        ("logit_bias", [{str(VOCAB): 1}, {"-1": 1}, {"abc": 1}, {str(10**12): 1}, {"1" * 400: 1}, {"1.0": 1}, {" 1": 1},
                        {"5": 1e30}, {"5": float("nan")}, {"5": 101}, {"5": None}, {"5": True}, {"5": "1"}, [5], 3]),
        ("prompt_logprobs", [-1, 21, VOCAB + 1, 10**6, True, 0.5]),
        ("stream", ["yes", 1, []]),
        ("ignore_eos", ["no", 0]),
        ("stream_options", [{"include_usage": True}, 5, "x"]),
        ("user", [5]),
        ("model", [5, ["chain"]]),
    ],
)  # fmt: skip
def test_fields_out_of_range(http: httpx.Client, path: str, name: str, values: list[Any]) -> None:
    for value in values:
        check(post(http, path, {name: value}), param=name)


def test_numbers_beyond_any_machine_word_are_no_trouble(http: httpx.Client) -> None:
    for value in (2**31, 2**63, 2**64, 10**400):
        assert post(http, TEXT, {"top_k": value, "max_tokens": 1}).status_code == 200
    for name in ("temperature", "repetition_penalty"):
        assert post(http, TEXT, {name: 1e308, "max_tokens": 1, "logit_bias": {str(POISON): -100}}).status_code == 200


def test_top_logprobs_beyond_the_limit(http: httpx.Client) -> None:
    for value in (21, VOCAB, VOCAB + 1, 10**6, -1, True):
        check(post(http, CHAT, {"logprobs": True, "top_logprobs": value}), param="top_logprobs")
        check(post(http, TEXT, {"logprobs": value}), param="logprobs")
    check(post(http, CHAT, {"top_logprobs": 3}), param="top_logprobs")
    check(post(http, CHAT, {"logprobs": 3}), param="logprobs")
    for value in (0, 20):
        assert post(http, CHAT, {"logprobs": True, "top_logprobs": value, "max_tokens": 1}).status_code == 200
        assert post(http, TEXT, {"logprobs": value, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["ok", ""], [[1], []], [-1], [VOCAB], [1.5], [True], [2**63], [10**400], [None], [["a"]],
     ["a", 1], [1, "a"], [["a"], "b"], ["a", [1]], [[1], 2], 5, True, {"a": 1}, None, [{}], ["x"] * 1025, [[[1]]]],
)  # fmt: skip
def test_prompts(http: httpx.Client, prompt: Any) -> None:
    check(post(http, TEXT, {"prompt": prompt}), param="prompt")


def test_the_last_token_of_the_vocabulary_is_a_prompt(http: httpx.Client) -> None:
    assert post(http, TEXT, {"prompt": [VOCAB - 2], "max_tokens": 1}).status_code == 200
    assert POISON == VOCAB - 1


@pytest.mark.parametrize(
    "messages",
    [[], None, "hi", [1], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}],
     [{"role": "wizard", "content": "x"}], [{"role": "<|system|>", "content": "x"}], [{"role": "user", "content": 5}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x"}}]}],
     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
     [{"role": "user", "content": [{"type": {}}]}], [{"role": "assistant", "tool_calls": [{}]}],
     [{"role": "assistant", "tool_calls": 5}], [{"role": "user", "content": "x", "name": 3}]],
)  # fmt: skip
def test_messages(http: httpx.Client, messages: Any) -> None:
    check(post(http, CHAT, {"messages": messages}), param="messages")
    check(
        http.post("/tokenize", json={"messages": messages})
        if messages is not None
        else post(http, CHAT, {"messages": None})
    )


def test_a_conversation_beyond_the_context_speaks_of_messages(http: httpx.Client) -> None:
    error = check(post(http, CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}), param="messages")
    assert error["code"] == "context_length_exceeded" and "5003" in error["message"] and "4096" in error["message"]


@pytest.mark.parametrize(
    "tools", [5, [5], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": 3}}]]
)
def test_tools(http: httpx.Client, tools: Any) -> None:
    check(post(http, CHAT, {"tools": tools}), param="tools")


def test_completions_fields_that_arent_offered(http: httpx.Client) -> None:
    check(post(http, TEXT, {"suffix": "x"}), param="suffix")
    check(post(http, TEXT, {"best_of": 3}), param="best_of")
    check(post(http, TEXT, {"best_of": 1, "n": 2}), param="best_of")
    assert post(http, TEXT, {"best_of": 2, "n": 2, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"5", b'"x"', b"{'prompt': 1}", b'{"prompt": "x",}', b'{"prompt": "x"} x',
     b"\xff\xfe\x00",
     b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xed\xa0\x80"}', b"\x00" * 100,
     b'{"junk": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b'{"junk": ' + b"[" * 200_000, b'{"a":' * 200_000,
     b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b'{"junk": ' + b"9" * 5000 + b"}", b'{"prompt": "x\n"}'],
)  # fmt: skip
def test_bodies_that_are_no_json(http: httpx.Client, body: bytes) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        check(http.post(path, content=body, headers={"content-type": "application/json"}))


def test_a_body_over_the_limit(http: httpx.Client, server: ServerProcess) -> None:
    limit = http.get("/server_info").json()["limits"]["max_request_bytes"]
    big = json.dumps({"prompt": "x" * limit}).encode()
    try:
        check(http.post(TEXT, content=big, headers={"content-type": "application/json"}), 413)
    except (httpx.WriteError, httpx.ReadError):
        pass  # the server answers before it has read it all, and may close before the client has sent it all

    def chunks() -> Iterator[bytes]:
        for _ in range(limit // 65536 + 2):
            yield b" " * 65536

    try:
        check(http.post(TEXT, content=chunks(), headers={"content-type": "application/json"}), 413)
    except (httpx.WriteError, httpx.ReadError):
        pass
    fits = json.dumps({"prompt": "x", "max_tokens": 1, "junk": "x" * (limit - 1000)}).encode()
    assert http.post(TEXT, content=fits, headers={"content-type": "application/json"}).status_code == 200
    host, port = server.url.removeprefix("http://").split(":")
    connection = http_client(host, int(port))
    connection.putrequest("POST", TEXT)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(10**12))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def http_client(host: str, port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(host, port, timeout=10)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x"]
)
def test_other_content_types(http: httpx.Client, kind: str) -> None:
    error = check(http.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": kind}), 415)
    assert "application/json" in error["message"]
    for good in ("application/json; charset=utf-8", "Application/JSON"):
        sent = http.post(TEXT, content=b'{"prompt": "x", "max_tokens": 1}', headers={"content-type": good})
        assert sent.status_code == 200


@pytest.mark.parametrize(
    "name", ["no-such", "", " chain", "Chain", "../../etc/hostname", "/etc/hostname", "..%2f", "a\u0000b", "x" * 5000]
)
def test_a_model_that_isnt_served(http: httpx.Client, name: str) -> None:
    for path in (TEXT, CHAT):
        error = check(post(http, path, {"model": name}), 404, "model")
        assert error["code"] == "model_not_found" and "'chain'" in error["message"]
    for path in ("/tokenize", "/detokenize"):
        check(http.post(path, json={"model": name, "prompt": "x", "tokens": [1]}), 404)
    if name.isprintable() and name and len(name) < 100:
        check(http.get("/v1/models/" + name.replace("%", "%25").replace(" ", "%20")), 404)


def test_routes_and_methods(http: httpx.Client) -> None:
    for method, path in [
        ("GET", "/nope"),
        ("POST", "/v1"),
        ("GET", "/v1/completions/x"),
        ("GET", "/docs"),
        ("DELETE", "/%2e%2e/etc"),
    ]:
        check(http.request(method, path), 404)
    for method, path in [
        ("GET", TEXT),
        ("PUT", CHAT),
        ("POST", "/health"),
        ("DELETE", "/v1/models"),
        ("POST", "/metrics"),
    ]:
        response = http.request(method, path)
        check(response, 405)
        assert response.headers["allow"]


def test_bytes_that_are_no_http(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for data in (
        b"\x00" * 200,
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"x" * 200_000,
    ):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            try:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while chunk := raw.recv(65536):
                    assert b"Traceback" not in chunk
            except OSError:  # it hung up first
                pass


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    for body in ({}, {"prompt": "x", "messages": []}, {"prompt": 5}, {"prompt": ["x"]}):
        check(http.post("/tokenize", json=body))
    for tokens in (None, 5, "x", [-1], [VOCAB], ["a"], [True], [1.5], [10**400]):
        check(http.post("/detokenize", json={"tokens": tokens}))


def test_a_request_that_the_cache_could_never_hold(http: httpx.Client) -> None:
    """Prompts times n above what one request may ask for."""
    check(post(http, TEXT, {"prompt": ["x"] * 1024, "n": 2}), param="n")


def test_errors_reach_the_official_client_typed(server: ServerProcess) -> None:
    import openai

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        client.chat.completions.create(model="chain", messages=[{"role": "user", "content": "x"}], temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="'chain'") as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError, match="NaN"):
        client.completions.create(model="chain", prompt=[1, POISON])
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.completions.create(model="chain", prompt=[[46], [1, POISON]], max_tokens=300, stream=True))
