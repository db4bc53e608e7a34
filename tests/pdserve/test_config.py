from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from pdserve.config import (
    PRESETS,
    DeploymentSettings,
    EngineSettings,
    NodeSettings,
    Settings,
    load_settings,
    parse_override,
)
from pdserve.errors import ConfigError
from pdserve.validation import sections

CLUSTERS = Path(__file__).parents[2] / "clusters"


def refusal(tmp_path: Path, text: str, overrides: dict[str, Any] | None = None) -> str:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{file}: ") or overrides
    return message.removeprefix(f"{file}: ")


def test_defaults_need_no_file() -> None:
    assert load_settings() == Settings()
    nodes = Settings().deployment
    assert (nodes.prefill, nodes.decode, nodes.colocated.count) == (NodeSettings(), NodeSettings(), 0)


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_file_loads(file: Path) -> None:
    load_settings(file)


@pytest.mark.parametrize("name", ["qwen-tp", "r1-tp", "r1-dp"])
def test_a_presets_file_asks_for_the_preset_as_it_is(name: str) -> None:
    """What it repeats, to be changed by whoever copies it, is what the preset says."""
    shipped, preset = load_settings(CLUSTERS / f"{name}.yaml"), load_settings(None, {"deployment.preset": name})
    assert shipped.deployment == preset.deployment
    assert shipped.ray_address == "auto"


def test_local_yaml_lists_every_key_with_its_default() -> None:
    listed = yaml.safe_load((CLUSTERS / "local.yaml").read_text())
    for name, section in sections(Settings).items():
        assert listed[name].keys() == section.model_fields.keys(), name
    assert load_settings(CLUSTERS / "local.yaml") == Settings()


@pytest.mark.parametrize("text", ["", "engine:\n", "engine: {}\n", "# nothing\n"])
def test_empty_files_and_sections_mean_the_defaults(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    assert load_settings(file) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {dtype: fp16}", "engine.dtype: got 'fp16', allowed: bf16, fp32"),
        ("engine: {page_size: 24}", "engine.page_size: got 24, allowed: 8, 16, 32, 64, 128"),
        ("engine: {page_size: true}", "engine.page_size: got True, allowed: 8, 16, 32, 64, 128"),
        ("engine: {max_batch: '8'}", "engine.max_batch: got '8', allowed: a whole number, at least 1"),
        ("engine: {max_batch: 0}", "engine.max_batch: got 0, allowed: a whole number, at least 1"),
        ("engine: {max_batch: 1.5}", "engine.max_batch: got 1.5, allowed: a whole number, at least 1"),
        ("engine: {max_batch: true}", "engine.max_batch: got True, allowed: a whole number, at least 1"),
        ("engine: {max_model_len: x}", "engine.max_model_len: got 'x', allowed: a whole number or null, at least 4"),
        ("engine: {deterministic: 1}", "engine.deterministic: got 1, allowed: true or false"),
        ("deployment: {preset: r2}", "deployment.preset: got 'r2', allowed: local, qwen-tp, r1-tp, r1-dp or null"),
        ("deployment: {decode: x}", "deployment.decode: got 'x', allowed: a number of nodes, at least 0, or a mapping"),
        ("deployment: {decode: -1}", "deployment.decode: got -1, allowed: a number of nodes, at least 0, or a mapping"),
        ("deployment: {decode: true}", "deployment.decode: got True, allowed: a number of nodes, at least 0, or a"),
        ("deployment: {decode: {tp: 0}}", "deployment.decode.tp: got 0, allowed: a whole number, at least 1, at most"),
        ("deployment: {decode: {ep: 8}}", "deployment.decode.ep: got 8, allowed: true or false"),
        ("http: {port: 65536}", "http.port: got 65536, allowed: a whole number, at least 0, at most 65535"),
        ("http: {host: 8}", "http.host: got 8, allowed: text"),
        ("handoff: {request_timeout_s: 0}", "handoff.request_timeout_s: got 0, allowed: a number, more than 0"),
        ("transport: {provider: gm}", "transport.provider: got 'gm', allowed: auto, efa, verbs;ofi_rxm, tcp"),
        ("transport: {nics: eth0}", "transport.nics: got 'eth0', allowed: a list, each text or null"),
        ("transport: {nics: []}", "transport.nics: got [], allowed: null, or a list that names at least one NIC"),
        ("transport: {nics: [a, b, a]}", "transport.nics: got ['a', 'b', 'a'], allowed: null, or a list that names"),
        ("transport: {allow_tcp: 1}", "transport.allow_tcp: got 1, allowed: true or false"),
        ("transport: {spin: often}", "transport.spin: got 'often', allowed: true or false or null"),
        ("model: {path: [a]}", "model.path: got ['a'], allowed: text"),
        ("ray_address: 6379", "ray_address: got 6379, allowed: text or null"),
        ("engine: fast", "engine: got 'fast', allowed: a mapping with keys dtype, deterministic, max_model_len"),
        ("- engine", "must hold a mapping of sections (model, engine, transport, deployment, handoff, http"),
        ("engine: {dtype: bf16", "line 1, column "),
        ("http: {port: 1}\nhttp: {port: 2}", "line 2, column 1: key 'http' appears twice"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engin: {}", "unknown key engin; did you mean engine? allowed here: model, engine, "),
        (
            "engine: {page_sise: 8}",
            "unknown key engine.page_sise; did you mean engine.page_size? allowed here: dtype, ",
        ),
        ("port: 8000", "unknown key port; did you mean http.port? allowed here: model, "),
        ("http: {dtype: bf16}", "unknown key http.dtype; did you mean engine.dtype? allowed here: host, port"),
        (
            "deployment: {decode: {gpu_typ: A}}",
            "unknown key deployment.decode.gpu_typ; did you mean deployment.decode.gpu_type? allowed",
        ),
        (
            "deployment: {tp: 2}",
            "unknown key deployment.tp; did you mean deployment.prefill.tp? allowed here: preset, ",
        ),
        ("engine: {zzz: 1}", "unknown key engine.zzz; allowed here: dtype, "),
        ("engine: {3: 1}", "line 1, column 10: key 3 must be text"),
        ("engine: {yes: 1}", "line 1, column 10: key True must be text"),
    ],
)
def test_unknown_keys_are_named_with_the_likely_one(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("engine: {chunk_tokens: 100}", ["engine: chunk_tokens (100)", "multiple of page_size (32)"]),
        ("engine: {kv_cache_tokens: 128}", ["engine: kv_cache_tokens (128)", "chunk_tokens + page_size = 160"]),
        (
            "engine: {kv_cache_tokens: 4096, max_model_len: 8192}",
            ["engine: kv_cache_tokens (4096)", "max_model_len (8192)"],
        ),
        ("deployment: {decode: {cpus: 0}}", ["deployment.decode: cpus and gpus are both 0"]),
        ("deployment: {decode: {gpus: 1.5}}", ["deployment.decode: gpus (1.5) above 1 must be a whole number"]),
        ("deployment: {prefill: {gpu_type: H200}}", ["deployment.prefill: gpu_type (H200)", "set gpus to 1"]),
        ("deployment: {prefill: {nics: 4}}", ["deployment.prefill: nics (4) needs a nic_type"]),
        ("deployment: {prefill: 0}", ["deployment: prefill (0) and decode (1) must both be at least 1"]),
        ("deployment: {colocated: 1, decode: 2}", ["deployment: colocated (1) excludes", "decode (2)"]),
    ],
)
def test_impossible_combinations_are_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert all(part in message for part in parts), message


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "engine: {dtype: x}\nhttp: {port: -1}")
    assert "engine.dtype" in message and "http.port" in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "absent.yaml")


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("engine: {dtype: fp32, max_batch: 4}")
    settings = load_settings(file, {"engine.dtype": "bf16", "http.port": 0})
    assert (settings.engine.dtype, settings.engine.max_batch, settings.http.port) == ("bf16", 4, 0)


def test_a_wrong_override_is_told_from_the_file(tmp_path: Path) -> None:
    message = refusal(tmp_path, "engine: {max_batch: 4}", {"engine.dtype": "fp8"})
    assert "engine.dtype (from the command line): got 'fp8', allowed: bf16, fp32" in message


@pytest.mark.parametrize("key", ["http.port.low", "engine.dtype.x"])
def test_an_override_below_a_value_is_refused(tmp_path: Path, key: str) -> None:
    assert key.rsplit(".", 1)[0] in refusal(tmp_path, "http: {port: 1}", {key: 1})


@pytest.mark.parametrize(
    ("text", "overrides", "counts"),
    [
        ("{}", {"colocated": 1}, (0, 0, 1)),
        ("deployment: {colocated: 2}", {}, (0, 0, 2)),
        ("deployment: {prefill: 1, decode: 2}", {"colocated": 1}, (0, 0, 1)),
        ("deployment: {prefill: 0, decode: 0, colocated: 1}", {"prefill": 1, "decode": 3}, (1, 3, 0)),
        ("deployment: {prefill: 1, decode: 2}", {"decode": 3}, (1, 3, 0)),
        ("deployment: {prefill: 2, decode: 2}", {"colocated": 0}, (2, 2, 0)),
    ],
)
def test_the_command_line_can_ask_the_baseline_of_any_file(
    tmp_path: Path, text: str, overrides: dict[str, int], counts: tuple[int, int, int]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    nodes = load_settings(file, {f"deployment.{key}": value for key, value in overrides.items()}).deployment
    assert (nodes.prefill.count, nodes.decode.count, nodes.colocated.count) == counts


@pytest.mark.parametrize(
    ("text", "overrides", "shapes"),
    [
        ("deployment: {decode: {tp: 2}}", {}, [(1, 1, 1, False), (1, 2, 1, False)]),
        ("deployment: {prefill: {count: 2, dp: 2, ep: true}}", {}, [(2, 1, 2, True), (1, 1, 1, False)]),
        ("deployment: {decode: {count: 3, tp: 2}}", {"decode": 1}, [(1, 1, 1, False), (1, 2, 1, False)]),
        ("deployment: {decode: 3}", {"decode.tp": 2}, [(1, 1, 1, False), (3, 2, 1, False)]),
        ("deployment:\n  decode:\n", {"decode.tp": 2, "prefill": 2}, [(2, 1, 1, False), (1, 2, 1, False)]),
        ("deployment: {preset: r1-dp}", {}, [(3, 8, 1, True), (1, 1, 8, True)]),
        ("deployment: {preset: r1-dp, decode: 2}", {"prefill.ep": False}, [(3, 8, 1, False), (2, 1, 8, True)]),
        ("deployment: {decode: {tp: 4}}", {"preset": "qwen-tp"}, [(1, 8, 1, False), (3, 8, 1, False)]),
        ("deployment: {preset: qwen-tp}", {"preset": "local"}, [(1, 1, 1, False), (1, 1, 1, False)]),
    ],
)
def test_nodes_have_shapes_that_start_from_a_preset(
    tmp_path: Path, text: str, overrides: dict[str, Any], shapes: list[tuple[int, int, int, bool]]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    nodes = load_settings(file, {f"deployment.{key}": value for key, value in overrides.items()}).deployment
    assert [(kind.count, kind.tp, kind.dp, kind.ep) for kind in (nodes.prefill, nodes.decode)] == shapes


def test_colocated_nodes_of_a_preset_have_its_decode_nodes_shape(tmp_path: Path) -> None:
    for name in PRESETS:
        nodes = load_settings(None, {"deployment.preset": name, "deployment.colocated": 2}).deployment
        shaped = load_settings(None, {"deployment.preset": name}).deployment.decode
        assert (nodes.prefill.count, nodes.decode.count) == (0, 0)
        assert nodes.colocated == shaped.model_copy(update={"count": 2})
    assert load_settings(None, {"deployment.colocated.tp": 2}).deployment.colocated == NodeSettings(count=1, tp=2)


def test_settings_survive_being_dumped_and_read_again() -> None:
    settings = load_settings(None, {"deployment.preset": "r1-dp", "deployment.decode.tp": 2})
    assert Settings.model_validate(settings.model_dump()) == settings
    assert DeploymentSettings(prefill=NodeSettings(tp=2), decode=NodeSettings(count=3)).prefill.tp == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine.page_size=16", ("engine.page_size", 16)),
        ("engine.deterministic=false", ("engine.deterministic", False)),
        ("model.name=null", ("model.name", None)),
        ("transport.provider=tcp;ofi_rxm", ("transport.provider", "tcp;ofi_rxm")),
        ("model.path=/a=b", ("model.path", "/a=b")),
    ],
)
def test_overrides_are_read_as_yaml(text: str, expected: tuple[str, Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["engine.dtype", "=3", "engine.dtype=[1", ""])
def test_malformed_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(text)


def test_pages_round_up() -> None:
    assert EngineSettings(kv_cache_tokens=4097, page_size=32).pages == 129


def test_a_preset_asked_for_sets_aside_the_nodes_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("deployment: {prefill: {count: 5, gpus: 2}, decode: 7, pin_cores: true}")
    asked = {"deployment.preset": "local", "deployment.decode": 2}
    found = load_settings(file, asked).deployment
    assert found == load_settings(None, {**asked, "deployment.pin_cores": True}).deployment


scalars = st.none() | st.booleans() | st.integers(-5, 70_000) | st.floats() | st.text(max_size=5)
keys = st.sampled_from([name for section in sections(Settings).values() for name in section.model_fields] + ["x"])
trees = st.dictionaries(
    st.sampled_from([*Settings.model_fields, "y"]),
    scalars | st.lists(scalars, max_size=2) | st.dictionaries(keys, scalars),
)


@given(trees)
def test_any_tree_loads_or_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(tree))
    try:
        settings: BaseModel = load_settings(file)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(settings, Settings)
