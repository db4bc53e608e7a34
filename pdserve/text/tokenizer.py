"""A model's tokenizer, read from its Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pdserve.errors import ModelError, RequestError
from pdserve.text.chat_template import ChatTemplate
from pdserve.text.detokenizer import Detokenizer
from pdserve.text.pieces import TokenPieces

Messages = Sequence[Mapping[str, Any]]


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(
        self, core: tokenizers.Tokenizer, *, chat_template: str | None = None, special: Mapping[str, str] | None = None
    ) -> None:
        """`special` maps roles such as `bos_token` to spellings. Raises ModelError."""
        core.no_truncation()
        core.no_padding()
        special = special or {}
        self._core = core
        self._pieces = TokenPieces.of(core)
        self._template = None if chat_template is None else ChatTemplate(chat_template, special)
        self.bos_token_id = self._id_of(special.get("bos_token"))
        self.eos_token_id = self._id_of(special.get("eos_token"))
        self.vocab_size: int = 1 + max(core.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the highest id."""

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Reads tokenizer.json, and tokenizer_config.json and chat_template.jinja where they are there.

        Raises ModelError.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory} has no tokenizer.json; pdserve needs the fast tokenizer's file")
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} is not a readable tokenizer: {error}") from error
        config = {**_json(directory / "special_tokens_map.json"), **_json(directory / "tokenizer_config.json")}
        return cls(core, chat_template=_chat_template(directory, config), special=_special_tokens(config))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; `add_special` lets the tokenizer put its begin-of-sequence token before it.

        Lets other threads run meanwhile. Raises RequestError when `text` is not Unicode (a lone surrogate).
        """
        try:
            # A batch of one: unlike encode(), it releases the GIL (measured: 40,000 words block for 0.5 s otherwise).
            (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from error
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        detokenizer = Detokenizer(self._pieces, skip_special=skip_special)
        return detokenizer.push(tokens) + detokenizer.finish()

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """A detokenizer for one sequence; `continues` when its text goes on from a prompt's."""
        return Detokenizer(self._pieces, continues=continues)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation. Raises RequestError."""
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions with a prompt", "messages")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def apply_chat_template(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. Raises RequestError."""
        return self.encode(self.render_chat(messages), add_special=False)

    def _id_of(self, spelling: str | None) -> int | None:
        return None if spelling is None else self._core.token_to_id(spelling)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold an object, not a {type(loaded).__name__}")
    return loaded


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The file of its own wins; a list of named templates gives its `default`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{directory}/tokenizer_config.json: chat_template is a {type(template).__name__}")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, …; a spelling is a string, or an object with the string as `content`."""
    found = {}
    for key, value in config.items():
        spelling = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(spelling, str):
            found[key] = spelling
    return found
