"""Checkpoints that users had trouble with: numbers of the wrong kind, unusual files, lengths that scaling changes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stenograph.config.facts import ModelFacts
from stenograph.distributed.tensor_parallel import TensorParallel
from stenograph.errors import ModelLoadError
from stenograph.layers.linear import Build
from stenograph.loading.loader import load_model
from stenograph.loading.source import open_model
from stenograph.models.registry import build_model
from stenograph.tokenizer.tokenizer import load_tokenizer
from tests.loading.test_gguf import names_of, write_gguf
from tests.loading.test_gguf import ours as load
from tests.tiny import config_of, reference_model, save_tiny, save_tokenizer
from tests.whole_pass import logits_of

IDS = [(i * 13) % 320 for i in range(30)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A configuration without weights: opened with dummy ones."""
    config_of("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


def facts_of(directory: Path, **changes: Any) -> ModelFacts:
    config = json.loads((directory / "config.json").read_text())
    config = {k: v for k, v in (config | changes).items() if v is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return open_model(str(directory), load_format="dummy").facts


WRONG = ["x", [], [1, 2], {"a": 1}, True, -1, float("nan"), float("inf")]


class TestConfiguration:
    @pytest.mark.parametrize("value", WRONG)
    @pytest.mark.parametrize(
        "field",
        ["hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings"],
    )
    def test_a_number_of_the_wrong_kind_is_named(self, directory: Path, field: str, value: Any) -> None:
        with pytest.raises(ModelLoadError, match=rf"config.json: {field} is .*, not a positive"):
            facts_of(directory, rope_parameters=None, **{field: value})

    @pytest.mark.parametrize("value", ["x", {"a": 1}, True, [1, "b"], 1.5])
    def test_end_ids_of_the_wrong_kind_are_named(self, directory: Path, value: Any) -> None:
        with pytest.raises(ModelLoadError, match="eos_token_id is .*, neither a token id nor a list"):
            facts_of(directory, eos_token_id=value)

    def test_end_ids_of_the_wrong_kind_in_the_generation_configuration(self, directory: Path) -> None:
        (directory / "generation_config.json").write_text('{"eos_token_id": "two"}')
        with pytest.raises(ModelLoadError, match="generation_config.json: eos_token_id is 'two'"):
            facts_of(directory)

    @pytest.mark.parametrize(
        "value", ["x", [1], {"rope_type": "yarn", "factor": "x"}, {"rope_type": "linear", "factor": 0}]
    )
    def test_rope_parameters_of_the_wrong_kind_are_told(self, directory: Path, value: Any) -> None:
        with pytest.raises(ModelLoadError, match="RoPE parameters|factor is"):
            facts_of(directory, rope_parameters=None, rope_scaling=value)

    def test_a_list_of_layer_kinds_that_is_too_short(self, directory: Path) -> None:
        with pytest.raises(ModelLoadError, match="layer_types is no list of 2 kinds"):
            facts_of(directory, sliding_window=8, layer_types=["full_attention"])


class TestLengths:
    @pytest.mark.parametrize("spelling", ["type", "rope_type"])
    @pytest.mark.parametrize(
        "kind,more,context",
        [
            ("linear", {}, 2048),
            ("linear", {"original_max_position_embeddings": 512}, 2048),
            ("dynamic", {}, 512),  # plain rotation, as far as it goes
            ("yarn", {"original_max_position_embeddings": 512}, 2048),
            ("yarn", {"original_max_position_embeddings": 128}, 512),
            ("llama3", {"original_max_position_embeddings": 128}, 512),
        ],
    )
    def test_the_context_is_the_scaled_one(
        self, directory: Path, spelling: str, kind: str, more: dict[str, int], context: int
    ) -> None:
        scaling = {spelling: kind, "factor": 4.0, **more}
        assert facts_of(directory, rope_parameters=None, rope_scaling=scaling).context_length == context

    def test_gemma_3_gives_the_scaled_length_itself(self, directory: Path) -> None:
        changes = {"model_type": "gemma3_text", "rope_parameters": None}
        facts = facts_of(directory, rope_scaling={"rope_type": "linear", "factor": 8.0}, **changes)
        assert (facts.context_length, facts.rope.factor) == (512, 8.0)

    @pytest.mark.parametrize(
        "changes,windowed",
        [
            ({"sliding_window": 8, "max_window_layers": 1}, (False, False)),  # off unless switched on
            ({"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": False}, (False, False)),
            ({"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, (False, True)),
            ({"sliding_window": 8, "max_window_layers": 0, "use_sliding_window": True}, (True, True)),
            ({"sliding_window": 8, "use_sliding_window": True}, (False, False)),
            ({"sliding_window": None, "use_sliding_window": True}, (False, False)),
        ],
    )
    def test_which_layers_of_qwen_are_windowed(
        self, directory: Path, changes: dict[str, Any], windowed: tuple[bool, ...]
    ) -> None:
        facts = facts_of(directory, model_type="qwen2", layer_types=None, **changes)
        assert facts.windowed_layers == windowed
        assert facts.sliding_window == (8 if any(windowed) else None)


def test_an_added_token_without_an_id_is_passed_over(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"one": {"content": "<|new|>"}}}')
    resolved: Any = SimpleNamespace(tokenizer=None, chat_template=None)
    tokenizer = load_tokenizer(open_model(str(directory), load_format="dummy"), resolved)
    assert tokenizer is not None and tokenizer.encode("a") == [97]


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{name} holds int8, no floating-point numbers"):
        load(tmp_path)


def test_code_that_comes_with_a_tokenizer_is_not_run_unasked(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text('{"a": 0}')
    (directory / "evil.py").write_text(f"open({str(directory / 'ran')!r}, 'w')")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    resolved: Any = SimpleNamespace(tokenizer=None, chat_template=None, trust_remote_code=False)
    with pytest.raises(ModelLoadError, match="not run unasked.*--trust-remote-code"):
        load_tokenizer(open_model(str(directory), load_format="dummy"), resolved)
    assert not (directory / "ran").exists()


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STENOGRAPH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match=r"cannot be kept in .*: Not a directory.*STENOGRAPH_CACHE"):
        open_model("smollm2-135m")


class TestNames:
    @pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-that-name/model", "nul\0byte", "", "one-word", "a/b/c"])
    def test_names_that_lead_nowhere(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelLoadError, match="Name a directory"):
            open_model(name)


def test_a_damaged_list_of_added_tokens_is_told(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|eos|>", "added_tokens_decoder": [1]}')
    with pytest.raises(ModelLoadError, match="tokenizer_config.json or tokenizer.json"):
        open_model(str(directory), load_format="dummy")


def write(directory: Path, extra: Any = None, architecture: str = "llama", **changes: Any) -> Any:
    """Writes tiny.gguf; returns the model it was made from."""
    model = reference_model(config_of(architecture, **changes))
    write_gguf(directory / "tiny.gguf", model, architecture, extra=extra)
    return model


def same_logits(path: Path, reference: Any, ids: list[int]) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(load(path), ids), expected, atol=1e-4, rtol=0)


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Whatever the key had before."""
    writer.kv_data[0].pop(key, None)
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


class TestUnusualGGUF:
    @pytest.mark.parametrize(
        "key,value",
        [
            ("llama.embedding_length", "x"),
            ("llama.embedding_length", True),
            ("llama.attention.head_count", -1),
            ("llama.attention.head_count_kv", "x"),
            ("llama.attention.head_count_kv", [1, 2]),
            ("llama.attention.key_length", float("nan")),
            ("llama.rope.freq_base", "x"),
            ("llama.rope.scaling.factor", "x"),
            ("tokenizer.ggml.eos_token_id", "x"),
            ("tokenizer.ggml.bos_token_id", 1.5),
            ("tokenizer.ggml.model", 3),
            ("tokenizer.ggml.tokens", "x"),
        ],
    )
    def test_values_of_the_wrong_kind_are_named(self, tmp_path: Path, key: str, value: Any) -> None:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_string("llama.rope.scaling.type", "linear")
            put(writer, key, value)

        write(tmp_path, change)
        with pytest.raises(ModelLoadError, match=rf"tiny.gguf.*{key}"):
            open_model(str(tmp_path))

    def test_more_layers_than_tensors(self, tmp_path: Path) -> None:
        write(tmp_path, lambda writer: put(writer, "llama.block_count", 10**9))
        with pytest.raises(ModelLoadError, match=r"\d+ tensors for 1000000000 layers"):
            open_model(str(tmp_path))

    def test_heads_that_do_not_divide_the_rows(self, tmp_path: Path) -> None:
        write(tmp_path, lambda writer: put(writer, "llama.attention.head_count", 6))
        with pytest.raises(ModelLoadError, match="attn_q.weight has 64 rows for 6 heads"):
            load(tmp_path)

    def test_arrays_within_arrays_without_end(self, tmp_path: Path) -> None:
        nested = struct.pack("<IQ", 9, 1) * 50_000
        key = b"deep"
        header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 9)
        (tmp_path / "deep.gguf").write_bytes(header + nested)
        with pytest.raises(ModelLoadError, match="deep.gguf is damaged"):
            open_model(str(tmp_path))

    def test_a_part_of_a_model_says_how_to_merge(self, tmp_path: Path) -> None:
        write(tmp_path, lambda writer: writer.add_uint16("split.count", 3))
        with pytest.raises(ModelLoadError, match=r"one of 3 parts.*--merge"):
            open_model(str(tmp_path))

    def test_a_file_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        write(tmp_path)
        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(ModelLoadError, match=r"tiny.gguf cannot be opened: Permission denied"):
            open_model(str(tmp_path))

    def test_a_mixture_of_experts_says_so(self, tmp_path: Path) -> None:
        write(tmp_path, lambda writer: writer.add_expert_count(8))
        with pytest.raises(ModelLoadError, match="mixture of 8 experts"):
            open_model(str(tmp_path))

    def test_a_type_that_cannot_be_dequantised_is_named(self, tmp_path: Path) -> None:
        def add(writer: gguf.GGUFWriter) -> None:
            raw = np.zeros((1, 292), dtype=np.uint8)
            writer.add_tensor("blk.0.extra.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_K)

        write(tmp_path, add)
        with pytest.raises(ModelLoadError, match="blk.0.extra.weight is of the type Q8_K"):
            open_model(str(tmp_path))

    def test_windows_given_layer_by_layer(self, tmp_path: Path) -> None:
        kinds = ["full_attention", "sliding_attention", "sliding_attention"]
        flags = [kind == "sliding_attention" for kind in kinds]

        def change(writer: gguf.GGUFWriter) -> None:
            put(writer, "gemma3.attention.sliding_window_pattern", flags)

        reference = write(tmp_path, change, "gemma3", layer_types=kinds, query_pre_attn_scalar=32)
        same_logits(tmp_path, reference, IDS)

    def test_linear_scaling_keeps_the_files_context(self, tmp_path: Path) -> None:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(4.0)

        scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
        reference = write(tmp_path, change, rope_parameters=scaling)
        assert open_model(str(tmp_path)).facts.context_length == 512
        same_logits(tmp_path, reference, IDS * 4)

    def test_yarn_keeps_the_files_context(self, tmp_path: Path) -> None:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(128)

        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
        reference = write(tmp_path, change, "qwen2", rope_parameters=scaling)
        assert open_model(str(tmp_path)).facts.context_length == 512
        same_logits(tmp_path, reference, IDS * 5)


def blocks(qtype: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    """Random weights in a K-quant: uint8 [rows, bytes]; every byte is a value, but for the half-precision scales."""
    size = gguf.GGML_QUANT_SIZES[qtype][1]
    raw = np.random.default_rng(seed).integers(0, 256, (rows * columns // 256, size), dtype=np.uint8)
    scale, low = np.array([6e-5], dtype="<f2").view(np.uint8), np.array([4e-4], dtype="<f2").view(np.uint8)
    if qtype.name == "Q6_K":
        raw[:, -2:] = scale
    else:
        raw[:, :2], raw[:, 2:4] = scale, low
    return raw.reshape(rows, -1)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """q and k of one type, v of another, norms in float32, the head of a third; and the same model dequantised."""
    directory = tmp_path_factory.mktemp("mixture")
    q4, q6 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
    kinds = {"q_proj": q4, "k_proj": q4, "v_proj": q6, "lm_head": q6, "down_proj": q6}
    model = reference_model(config_of("llama", hidden_size=256, intermediate_size=256, head_dim=64))
    raw: dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] = {}
    with torch.no_grad():
        for seed, (name, value) in enumerate(model.named_parameters()):
            kind = kinds.get(name.split(".")[-2])
            if kind is not None:
                data = blocks(kind, *value.shape, seed=seed)
                raw[name] = data, kind
                value.copy_(torch.from_numpy(gguf.dequantize(data, kind).reshape(value.shape)))
    write_gguf(directory / "plain.gguf", model, "llama")
    replace_tensors(directory / "plain.gguf", directory / "mixed.gguf", raw, head_dim=64)
    return directory / "mixed.gguf", model


def test_a_mixture_of_k_quants_equals_the_dequantised_model(mixture: tuple[Path, Any]) -> None:
    same_logits(*mixture, IDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_ranks_takes_its_share_of_quantised_weights(
    mixture: tuple[Path, Any], tmp_path: Path, rank: int
) -> None:
    """Shares cut across blocks of 256, too: 128 columns of down_proj are half a block."""
    path, model = mixture
    model.save_pretrained(tmp_path)
    shares = []
    for where in (path, tmp_path):
        source = open_model(str(where))
        share = build_model(Build(torch.device("cpu"), torch.float32, TensorParallel(rank, 2)), source.facts, 64)
        with torch.inference_mode():
            load_model(source, share, rank=rank, world_size=2, progress=False)
        shares.append(dict(share.named_parameters()))
    assert shares[0].keys() == shares[1].keys()
    for name, value in shares[0].items():
        assert torch.equal(value, shares[1][name]), name
    assert shares[0]["model.layers.0.mlp.down_proj.weight"].shape == (256, 128)


def replace_tensors(source: Path, target: Path, raw: dict[str, Any], *, head_dim: int) -> None:
    """A copy of a file with some tensors as blocks (by their names in the Hugging Face layout)."""
    table = names_of("llama")
    blocks_by_name = {}
    for name, found in raw.items():
        stem = name.rpartition(".")[0]
        layer = stem.split(".", 3)
        target_name = f"blk.{layer[2]}.{table[layer[3]]}" if stem.startswith("model.layers.") else table[stem]
        blocks_by_name[f"{target_name}.weight"] = found
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(target), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name not in blocks_by_name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        data, kind = blocks_by_name[tensor.name]
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):  # in pairs, as these files have it
            data = data.reshape(-1, 2, head_dim // 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestHub:
    """Nothing here reaches the network: the hub is offline, or stands behind a proxy that does not answer."""

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A cache that holds some-org/tiny."""
        from huggingface_hub import constants

        cache = tmp_path / "hub"
        snapshot = cache / "models--some-org--tiny" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
        save_tiny(snapshot)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        return cache

    @pytest.fixture(params=["offline", "dead proxy"])
    def no_network(self, request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        from huggingface_hub import close_session, constants

        if request.param == "offline":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        else:
            for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, "http://127.0.0.1:9")
            monkeypatch.setenv("no_proxy", "")
            monkeypatch.setenv("NO_PROXY", "")
            close_session()  # one that an earlier test opened knows nothing of the proxy
        yield
        close_session()

    @pytest.mark.usefixtures("cache", "no_network")
    def test_what_is_cached_opens_without_a_network(self) -> None:
        assert open_model("some-org/tiny").facts.num_layers == 2

    @pytest.mark.usefixtures("cache", "no_network")
    def test_what_is_not_cached_says_so_in_one_line(self) -> None:
        with pytest.raises(ModelLoadError, match="some-org/other is not in the local cache, and ") as caught:
            open_model("some-org/other")
        assert "\n" not in str(caught.value) and "Connect to the internet" in str(caught.value)

    def test_a_name_that_no_repository_can_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelLoadError, match="neither a path that exists nor a valid repository id"):
            open_model("a model/with spaces")
