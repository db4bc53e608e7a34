"""Loading: what is read, what is refused and how, conversion, fingerprints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import ModelError
from pdserve.models.checkpoint import open_checkpoint
from pdserve.models.load import load_model, read_config
from pdserve.models.safetensors_file import convert, open_tensors, write_tensors
from tests.pdserve.models.tiny import BOS, EOS, VOCAB, make_tiny_llama
from tests.pdserve.models.tiny_families import make_tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny-llama")


def edit(directory: Path, **changes: Any) -> None:
    raw = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def test_config_follows_the_directory(tiny: Path) -> None:
    config = read_config(tiny)
    assert (config.name, config.layers, config.heads, config.kv_heads, config.head_dim) == ("tiny-llama", 2, 4, 2, 16)
    assert (config.vocab, config.context, config.rope_theta, config.tied_embeddings) == (VOCAB, 512, 10000.0, False)
    assert (config.bos_token_id, config.eos_token_ids) == (BOS, (EOS,))
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 260]}))
    assert read_config(tiny).eos_token_ids == (EOS, 260)


def test_head_dim_and_kv_heads_have_defaults_and_rope_two_spellings(tiny: Path) -> None:
    edit(
        tiny,
        head_dim=None,
        num_key_value_heads=None,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 7.0},
    )
    config = read_config(tiny)
    assert (config.head_dim, config.kv_heads, config.rope_theta) == (16, 4, 7.0)


def test_the_fingerprint_knows_weights_and_settings_but_no_paths(tiny: Path, tmp_path: Path) -> None:
    fingerprint = read_config(tiny).fingerprint
    assert read_config(make_tiny_llama(tmp_path / "elsewhere")).fingerprint == fingerprint
    assert read_config(make_tiny_llama(tmp_path / "other", seed=1)).fingerprint != fingerprint
    edit(tiny, rope_theta=20000.0)
    assert read_config(tiny).fingerprint != fingerprint


def test_a_sharded_checkpoint_is_the_same_model(tiny: Path, tmp_path: Path) -> None:
    tensors = {name: entry.data for name, entry in open_tensors(tiny / "model.safetensors").items()}
    sharded = make_tiny_llama(tmp_path / "sharded", seed=9)
    (sharded / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for index, part in enumerate((names[:7], names[7:])):
        file = f"model-0000{index + 1}-of-00002.safetensors"
        write_tensors(sharded / file, {name: tensors[name] for name in part}, "fp32")
        weight_map |= dict.fromkeys(part, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_config(sharded).fingerprint == read_config(tiny).fingerprint
    load_model(sharded, "fp32")
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names model-00002-of-00002.safetensors, which is not there"):
        read_config(sharded)


def test_safetensors_can_be_read_by_the_library_and_the_library_s_by_us(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float32)}
    write_tensors(tmp_path / "ours.safetensors", tensors, "fp32")
    for name, array in load_file(tmp_path / "ours.safetensors").items():
        assert np.array_equal(array, tensors[name])
    save_file(tensors, tmp_path / "theirs.safetensors")
    for name, entry in open_tensors(tmp_path / "theirs.safetensors").items():
        assert np.array_equal(entry.data, tensors[name]) and not entry.data.flags.writeable


def test_another_dtype_is_converted_once_into_the_cache_and_mapped(tiny: Path, cache: Path) -> None:
    load_model(tiny, "fp32")
    assert not (cache / "models" / "converted").exists()
    said: list[str] = []
    model = load_model(tiny, "bf16", progress=said.append)
    assert any("converting tiny-llama to bf16" in line for line in said)
    (copy,) = (cache / "models" / "converted").glob("*.safetensors")
    source = open_checkpoint(tiny).tensors["lm_head.weight"].data
    assert np.array_equal(open_tensors(copy)["lm_head.weight"].data, convert(source, "bf16"))
    assert model.ends.head.dtype == np.uint16 and not model.ends.head.flags.owndata
    said.clear()
    load_model(tiny, "bf16", progress=said.append)
    assert not any("converting" in line for line in said)


def test_routers_and_biases_stay_as_they_are_stored(tmp_path: Path, cache: Path) -> None:
    model = load_model(make_tiny("deepseek", tmp_path / "model"), "bf16")
    weights = model._layers[1].feed_forward._weights  # type: ignore[attr-defined]
    assert weights.router.dtype == np.float32 and weights.choice_bias.dtype == np.float32
    assert weights.experts[0].gate.dtype == np.uint16
    (copy,) = (cache / "models" / "converted").glob("*.safetensors")
    assert not any(name.endswith(("mlp.gate.weight", "norm.weight", "bias")) for name in open_tensors(copy))


def test_two_processes_may_convert_at_once(tiny: Path, cache: Path) -> None:
    program = "import sys; from pdserve.models.load import load_model; load_model(sys.argv[1], 'bf16', ops=object())"
    environment = os.environ | {"PDSERVE_CACHE": str(cache)}
    running = [subprocess.Popen([sys.executable, "-c", program, str(tiny)], env=environment) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(list((cache / "models" / "converted").glob("*.safetensors"))) == 1


def test_float16_is_converted_too(tmp_path: Path, cache: Path) -> None:
    from safetensors.numpy import save_file

    directory = make_tiny_llama(tmp_path / "half")
    tensors = {name: entry.data.astype(np.float16) for name, entry in open_checkpoint(directory).tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    model = load_model(directory, "fp32")
    assert np.array_equal(model.ends.embedding, tensors["model.embed_tokens.weight"].astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, r"is a MistralForCausalLM, which is not supported \(supp"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*fp8.* is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, r"rope type 'linear' is not supported \(supp"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "needs 'original_max_position_embeddings'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "needs 'low_freq_factor'"),
        ({"num_hidden_layers": 3}, r"no tensor 'model.layers.2.self_attn.q_proj.weight'"),
        ({"intermediate_size": 97}, r"mlp.gate_proj.weight is \(96, 64\), config.json asks for \(97, 64\)"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(tiny: Path, changes: dict[str, Any], message: str) -> None:
    edit(tiny, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(tiny, "fp32")


def test_missing_and_broken_files_are_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a directory"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"cannot read .*empty/config.json"):
        read_config(tmp_path / "empty")
    weights = (tiny / "model.safetensors").read_bytes()
    for content, message in (
        (weights[:5000], "damaged or cut short"),
        (b"abc", "not a safetensors file"),
        (b"", "cannot map"),
    ):
        (tiny / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=message):
            read_config(tiny)
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        read_config(tiny)
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tiny)
