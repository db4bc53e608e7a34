"""Reading a model's tokenizer, and chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.errors import ModelError, RequestError
from pdserve.text import Tokenizer
from pdserve.text.chat_template import ChatTemplate
from tests.pdserve.text.small_tokenizers import CHATML, CORES, save_model_directory

USER = [{"role": "user", "content": "hello"}]


def test_from_directory(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(save_model_directory(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.vocab_size == CORES["byte_level"].get_vocab_size()
    tokens = tokenizer.apply_chat_template(USER)
    assert tokens[0] == 1
    assert tokenizer.decode(tokens, skip_special=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokens) == "user\nhello\nassistant\n"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    save_model_directory(tmp_path)
    path = tmp_path / "tokenizer.json"
    core = CORES["byte_level"].from_file(str(path))
    core.enable_truncation(3)
    core.enable_padding(length=8)
    core.save(str(path))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode(tokenizer.encode("zq zq zq zq")) == "zq zq zq zq"
    assert len(tokenizer.encode("z")) == 1


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path)
    save_model_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    save_model_directory(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_directory(tmp_path).render_chat(USER) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).render_chat(USER) == "file"


def test_no_template_is_a_clear_error() -> None:
    with pytest.raises(RequestError, match="no chat template; use /v1/completions") as caught:
        Tokenizer(CORES["byte_level"]).apply_chat_template(USER)
    assert caught.value.param == "messages"


def test_a_lone_surrogate_is_the_callers_fault() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        Tokenizer(CORES["byte_level"]).encode("\ud83d")


def render(source: str, messages: list[dict[str, str]] = USER) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)


def test_templates_have_what_hugging_face_gives_them() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>hello</s>"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert render("{% if tools %}tools{% endif %}{% if add_generation_prompt %}go{% endif %}") == "go"


def test_a_template_may_refuse() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        render(source, [{"role": "assistant", "content": ""}])
    with pytest.raises(RequestError, match="refuses these messages"):
        render("{{ messages[5].content + 'x' }}")


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_broken_template() -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        Tokenizer(CORES["byte_level"], chat_template="{% if %}")


def test_templates_equal_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_model_directory(tmp_path)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    conversation = [*USER, {"role": "assistant", "content": "日本 🦀"}, {"role": "user", "content": " more\n"}]
    text = reference.apply_chat_template(conversation, chat_template=CHATML, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.from_directory(tmp_path).render_chat(conversation) == text
