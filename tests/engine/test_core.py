"""The engine core on a tiny model: every answer equals the one a request gets alone, and every page comes back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stenograph import LLM, SamplingParams
from stenograph.engine.types import EngineOutput, EngineRequest
from stenograph.errors import ConfigError, RequestError
from tests.tiny import EOS_ID, VOCAB, greedy_reference, save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("tiny-llama")
    return directory, save_tiny(directory, "llama")


def engine(directory: Path, **options: Any) -> LLM:
    base = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_total_tokens": 4096,
        "page_size": 16,
        "progress": False,
    }
    return LLM(str(directory), **{**base, **options})


@pytest.fixture(scope="module")
def llm(tiny: tuple[Path, Any]) -> LLM:
    return engine(tiny[0])


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **changes})


def ids_of(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def poison(llm: LLM) -> None:
    """NaN in every page but the padding page: nothing may read what it hasn't written."""
    cache = llm.core.executor.cache
    with torch.inference_mode():
        for tensor in (*cache.keys, *cache.values):
            tensor[cache.page_size :] = torch.nan


def drive(llm: LLM, requests: list[EngineRequest], *, abort: Any = None) -> dict[str, list[EngineOutput]]:
    """Feeds requests at random moments; `abort(step)` names ids to abort. Returns each request's outputs."""
    core, waiting = llm.core, list(requests)
    found: dict[str, list[EngineOutput]] = {r.request_id: [] for r in requests}
    rng, step = random.Random(1), 0
    while waiting or core.has_work():
        for _ in range(min(len(waiting), rng.randint(0, 4))):
            core.add_request(waiting.pop(0))
        outputs = core.step()
        if abort is not None:
            outputs += core.abort(abort(step, [r.request_id for r in requests if r not in waiting]))
        for output in outputs:
            found[output.request_id].append(output)
        step += 1
        assert step < 20_000, "the engine makes no progress"
    return found


def test_500_requests_a_tenth_aborted_every_answer_as_if_alone(tiny: tuple[Path, Any]) -> None:
    """Small pools, so that requests are preempted too; greedy and seeded requests with penalties side by side."""
    llm = engine(tiny[0], max_total_tokens=280, page_size=4, max_running_requests=16, chunked_prefill_size=32)
    poison(llm)
    rng = random.Random(3)
    requests = []
    for i in range(500):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        count = rng.randint(1, 30)
        params = greedy(count)
        if i % 3 == 1:
            params = SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=count)
        if i % 7 == 2:
            params = params.replace(repetition_penalty=1.3, presence_penalty=0.4, logprobs=2)
        requests.append(EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=params))
    doomed = set(rng.sample([r.request_id for r in requests], 50))

    def abort(step: int, known: list[str]) -> list[str]:
        chosen = [i for i in known if i in doomed and rng.random() < 0.2]
        doomed.difference_update(chosen)
        return chosen

    everyone = set(doomed)
    found = drive(llm, requests, abort=abort)
    stats = llm.core.stats()
    assert stats.free_pages == stats.total_pages and stats.running == stats.waiting == 0
    assert stats.preemptions > 0, "the pool was meant to be too small"
    roomy = engine(tiny[0])
    aborted = 0
    for request in requests:
        outputs = found[request.request_id]
        assert [o.finish_reason for o in outputs].count(None) == len(outputs) - 1, "exactly one end"
        reason = outputs[-1].finish_reason
        assert reason in ("stop", "length", "abort")
        aborted += reason == "abort"
        tokens = [t for o in outputs for t in o.token_ids]
        if reason == "abort":
            assert request.request_id in everyone
            continue
        alone = roomy.generate([request.prompt_token_ids], request.sampling)[0].outputs[0]
        assert tokens == alone.token_ids and reason == alone.finish_reason
        if request.sampling.logprobs is not None:
            got = [lp for o in outputs for lp in o.logprobs or []]
            assert [lp.token_id for lp in got] == tokens
            assert [lp.logprob for lp in got] == pytest.approx([lp.logprob for lp in alone.logprobs or []], abs=1e-4)
    assert 20 <= aborted <= 50


def test_last_chunk_lengths_around_page_and_chunk_edges(tiny: tuple[Path, Any]) -> None:
    """Chunks of 16, 32, 48; prompts one below, at and above their multiples; alone and twenty at once."""
    rng = random.Random(4)
    for chunk in (16, 32, 48):
        llm = engine(tiny[0], chunked_prefill_size=chunk, max_running_requests=32)
        poison(llm)
        prompts = [[rng.randrange(VOCAB) for _ in range(chunk * j + d)] for j in (1, 2, 3) for d in (-1, 0, 1)]
        together = [o.outputs[0].token_ids for o in llm.generate(prompts + prompts + prompts[:2], greedy(4))]
        expected = [greedy_reference(tiny[1], p, 4) for p in prompts]
        assert together == expected + expected + expected[:2]
        assert ids_of(llm, prompts[1], greedy(4)) == expected[1]


def test_many_requests_that_end_in_their_first_step_leak_nothing(tiny: tuple[Path, Any]) -> None:
    llm = engine(tiny[0], max_total_tokens=1024)
    requests = [
        EngineRequest(
            request_id=str(i), prompt_token_ids=[i % VOCAB] * (1 + i % 40), sampling=greedy(1 if i % 2 else 9)
        )
        for i in range(300)
    ]
    drive(llm, requests)
    assert llm.core.stats().free_pages == llm.core.stats().total_pages


def test_preempted_requests_keep_their_text_penalties_seeds_and_logprobs(tiny: tuple[Path, Any]) -> None:
    small = engine(tiny[0], max_total_tokens=84, page_size=4, max_running_requests=4)
    large = engine(tiny[0])
    variants = [
        greedy(60, logprobs=1),
        greedy(60, repetition_penalty=1.5, frequency_penalty=0.7),
        SamplingParams(temperature=1.0, seed=11, max_tokens=60, min_tokens=50),
        greedy(60, prompt_logprobs=1),
    ]
    prompts = [[i, i + 1, i + 2] for i in range(4)]
    first, second = small.generate(prompts, variants), large.generate(prompts, variants)
    assert small.core.stats().preemptions >= 3
    for a, b in zip(first, second, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids and a.outputs[0].text == b.outputs[0].text
        assert len(a.outputs[0].logprobs or []) == len(b.outputs[0].logprobs or [])
        assert len(a.prompt_logprobs or []) == len(b.prompt_logprobs or [])


def test_a_request_that_can_never_fit_is_refused_and_the_next_one_runs(tiny: tuple[Path, Any]) -> None:
    llm = engine(tiny[0], max_total_tokens=64)
    with pytest.raises(RequestError, match="cache holds 65"):
        llm.generate([[1] * 100], greedy(4))
    with pytest.raises(RequestError, match="cache holds 65"):
        llm.generate([[1] * 40], greedy(40))
    assert len(ids_of(llm, [1, 2, 3], greedy(4))) == 4


def test_a_prompt_alone_that_fills_the_cache_runs_and_one_token_more_is_refused(tiny: tuple[Path, Any]) -> None:
    """With max_tokens 0 every token of the prompt is stored; one that could never be admitted would wait for ever."""
    llm = engine(tiny[0], max_total_tokens=64)
    out = llm.generate([[1] * 64], greedy(0, prompt_logprobs=0))[0]
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == 64
    with pytest.raises(RequestError, match="cache holds 65"):
        llm.generate([[1] * 65], greedy(0))
    assert not llm.core.has_work()


@pytest.mark.parametrize(
    "prompt,count,fits", [(500, 12, True), (500, 13, False), (511, 1, True), (512, 1, False), (900, 1, False)]
)
def test_the_context_length_is_kept_to_the_token(llm: LLM, prompt: int, count: int, fits: bool) -> None:
    if fits:
        answer = llm.generate([[1] * prompt], greedy(count))[0].outputs[0]
        assert len(answer.token_ids) == count and answer.finish_reason == "length"
    else:
        with pytest.raises(RequestError, match=rf"{prompt}.*512"):
            llm.generate([[1] * prompt], greedy(count))


def test_no_max_tokens_fills_the_context(llm: LLM) -> None:
    answer = llm.generate([[7] * 480], greedy(1).replace(max_tokens=None))[0].outputs[0]
    assert len(answer.token_ids) == 32 and answer.finish_reason == "length"


def test_any_of_the_end_ids_stops_unless_ignored_or_too_early(tiny: tuple[Path, Any], llm: LLM) -> None:
    force = {EOS_ID: 100.0}
    ended = llm.generate([[1, 2]], greedy(8, ignore_eos=False, logit_bias=force))[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([EOS_ID], "stop", None)
    ignored = llm.generate([[1, 2]], greedy(8, logit_bias=force))[0].outputs[0]
    assert (len(ignored.token_ids), ignored.finish_reason) == (8, "length")
    late = llm.generate([[1, 2]], greedy(30, ignore_eos=False, logit_bias=force, min_tokens=20))[0].outputs[0]
    assert len(late.token_ids) == 21 and late.token_ids[-1] == EOS_ID and EOS_ID not in late.token_ids[:-1]


def test_the_requests_own_stop_ids_work_even_when_eos_is_ignored(llm: LLM) -> None:
    expected = ids_of(llm, [1, 2, 3], greedy(20))
    stop = expected[5]
    answer = llm.generate([[1, 2, 3]], greedy(20, stop_token_ids=(stop,)))[0].outputs[0]
    assert answer.token_ids == expected[: expected.index(stop) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_stop_strings_across_tokens_cut_before_the_match(llm: LLM) -> None:
    forced = {ord("a"): 100.0}
    text = llm.generate("x", greedy(9, logit_bias=forced))[0].outputs[0].text
    assert text == "a" * 9
    cut = llm.generate("x", greedy(9, logit_bias=forced, stop=("aaaa",)))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("", "stop", "aaaa")
    kept = llm.generate("x", greedy(9, logit_bias=forced, stop=("aaaa",), include_stop_str_in_output=True))[0].outputs[
        0
    ]
    assert kept.text == "aaaa" and len(kept.token_ids) == 4
    late = llm.generate("x", greedy(9, logit_bias=forced, stop=("aa",), min_tokens=5))[0].outputs[0]
    assert late.finish_reason == "stop" and len(late.token_ids) == 6
    assert llm.core.stats().free_pages == llm.core.stats().total_pages


def test_streamed_text_joins_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    whole = llm.generate("hello", params)[0].outputs[0]
    parts = list(llm.stream("hello", params))
    assert "".join(p.outputs[0].text for p in parts) == whole.text
    assert [t for p in parts for t in p.outputs[0].token_ids] == whole.token_ids
    assert [p.finished for p in parts].count(True) == 1 and parts[-1].finished


def test_streams_and_whole_answers_run_side_by_side(llm: LLM) -> None:
    alone = [llm.generate(text, greedy(12))[0].outputs[0].token_ids for text in ("ab", "cd", "ef")]
    first, second = llm.stream("ab", greedy(12)), llm.stream("cd", greedy(12))
    found: list[list[int]] = [[], []]
    for turn, (a, b) in enumerate(zip(first, second, strict=True)):
        found[0] += a.outputs[0].token_ids
        found[1] += b.outputs[0].token_ids
        if turn == 3:
            assert llm.generate("ef", greedy(12))[0].outputs[0].token_ids == alone[2]
    assert found == alone[:2] and not llm.core.has_work() and not llm._news


def test_leaving_a_stream_early_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("hello", greedy(100))
    next(stream)
    assert llm.core.stats().free_pages < llm.core.stats().total_pages
    stream.close()
    assert llm.core.stats().free_pages == llm.core.stats().total_pages and not llm.core.has_work()


def test_n_sequences_are_complete_distinct_and_repeatable(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate([[1, 2, 3]], params)[0] for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert all(len(o.token_ids) == 12 and o.finish_reason == "length" for o in first.outputs)
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    alone = llm.generate([[1, 2, 3]], params.replace(n=1))[0].outputs[0]
    assert alone.token_ids == first.outputs[0].token_ids


def test_unseeded_requests_differ_and_a_seeded_one_repeats_beside_them(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    seeded = free.replace(seed=42)
    runs = []
    for others in range(4):
        outs = llm.generate([[1, 2]] * (others + 1), [*([free] * others), seeded])
        runs.append(tuple(outs[-1].outputs[0].token_ids))
    assert len(set(runs)) == 1
    assert len({tuple(o.outputs[0].token_ids) for o in llm.generate([[1, 2]] * 8, free)}) > 1


def test_prompt_logprobs_equal_the_reference_across_chunks(tiny: tuple[Path, Any]) -> None:
    prompt = [(i * 31) % VOCAB for i in range(65)]
    with torch.inference_mode():
        reference = tiny[1](torch.tensor([prompt])).logits[0].log_softmax(-1)
    for options in ({"chunked_prefill_size": 16}, {"chunked_prefill_size": 512}, {"page_size": 1}):
        out = engine(tiny[0], **options).generate([prompt], greedy(1, prompt_logprobs=3, logprobs=2))[0]
        assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == 65 and out.prompt_logprobs[0] is None
        for i, entry in enumerate(out.prompt_logprobs[1:]):
            assert entry is not None and entry.token_id == prompt[i + 1]
            assert entry.logprob == pytest.approx(reference[i, prompt[i + 1]].item(), abs=1e-4)
            assert entry.rank == 1 + int((reference[i] > reference[i, prompt[i + 1]]).sum())
            assert [t for t, _ in entry.top] == reference[i].topk(3).indices.tolist()
        last = out.outputs[0].logprobs
        assert last is not None and last[0].logprob == pytest.approx(reference[-1].max().item(), abs=1e-4)


@pytest.mark.parametrize("chunk", [5, 16, 24, 100])
def test_prompt_logprobs_survive_preemption_into_other_chunks(tiny: tuple[Path, Any], chunk: int) -> None:
    prompt = [(i * 31) % VOCAB for i in range(65)]
    llm = engine(tiny[0], chunked_prefill_size=16)
    params = greedy(1, prompt_logprobs=0)
    whole = llm.generate([prompt], params)[0].prompt_logprobs
    llm.core.add_request(EngineRequest(request_id="r", prompt_token_ids=prompt, sampling=params))
    llm.core.step()
    scheduler = llm.core.scheduler
    scheduler._preempt(scheduler.running[0])
    scheduler.chunk = chunk
    outputs: list[EngineOutput] = []
    while llm.core.has_work():
        outputs += llm.core.step()
    assert whole is not None and outputs[0].prompt_logprobs is not None
    assert [e and e.token_id for e in outputs[0].prompt_logprobs] == [e and e.token_id for e in whole]
    again = [e.logprob for e in outputs[0].prompt_logprobs if e is not None]
    assert again == pytest.approx([e.logprob for e in whole if e is not None], abs=1e-4)


def test_max_tokens_zero_gives_the_prompts_logprobs_alone(llm: LLM) -> None:
    out = llm.generate([[1, 2, 3]], greedy(0, prompt_logprobs=0))[0]
    assert out.outputs[0].token_ids == [] and out.outputs[0].finish_reason == "length"
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == 3


def test_nan_in_one_request_fails_it_alone(tmp_path: Path) -> None:
    """A poisoned embedding row; its pages are reused by others afterwards."""
    save_tiny(tmp_path, "llama")
    llm = engine(tmp_path, max_total_tokens=128)
    good = [1, 2, 3, 4, 5]
    expected = ids_of(llm, good, greedy(12))
    with torch.inference_mode():
        llm.core.executor.model.embed.weight[77] = torch.nan
    outs = llm.generate([[5, 77, 6], good, [77]], greedy(12))
    assert "NaN" in (outs[0].error or "") and outs[0].outputs[0].finish_reason == "error"
    assert outs[1].error is None and outs[1].outputs[0].token_ids == expected
    assert "NaN" in (outs[2].error or "")
    for _ in range(3):
        again = llm.generate([good, [3], good], greedy(12))
        assert again[0].outputs[0].token_ids == again[2].outputs[0].token_ids == expected
    assert llm.core.stats().free_pages == llm.core.stats().total_pages


def test_a_failing_step_ends_its_requests_with_an_error_and_the_engine_lives(
    tiny: tuple[Path, Any], monkeypatch: Any
) -> None:
    llm = engine(tiny[0])
    real = llm.core.executor.execute
    monkeypatch.setattr(llm.core.executor, "execute", lambda step: (_ for _ in ()).throw(RuntimeError("boom")))
    out = llm.generate([[1, 2, 3]], greedy(4))[0]
    assert out.outputs[0].finish_reason == "error" and "RuntimeError" in (out.error or "")
    monkeypatch.setattr(llm.core.executor, "execute", real)
    assert len(ids_of(llm, [1, 2, 3], greedy(4))) == 4
    assert llm.core.stats().free_pages == llm.core.stats().total_pages


@pytest.mark.parametrize(
    "prompt,message",
    [("", "empty"), ([], "empty"), ([VOCAB], "not a token id"), ([-1], "not a token id"), ([1.5], "not a token id")],
)
def test_bad_prompts_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], greedy(4))
    assert not llm.core.has_work()


def test_one_bad_prompt_among_good_ones_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate([[1], [2], [VOCAB]], greedy(4))
    assert not llm.core.has_work() and llm.core.stats().free_pages == llm.core.stats().total_pages


def test_a_cache_smaller_than_asked_for_is_told(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine(tiny[0])
    assert "max_total_tokens" not in caplog.text
    monkeypatch.setattr("stenograph.executor.executor.available_host_bytes", lambda: 1 << 20)
    small = engine(tiny[0], chunked_prefill_size=16, max_running_requests=16)
    held = 16 * small.core.allocator.capacity
    assert held < 4096 and f"max_total_tokens is 4096, but memory holds {held}" in caplog.text


def test_unknown_options_name_the_nearest(tiny: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        LLM(str(tiny[0]), page_sise=16)


def test_chat_uses_the_template(llm: LLM) -> None:
    out = llm.chat([{"role": "user", "content": "hi"}], greedy(3))[0]
    assert out.prompt_token_ids == llm.tokenizer.encode("<|user|>hi<|end|><|assistant|>")
    assert len(out.outputs[0].token_ids) == 3
