"""Small tokenizers of both families, trained here: byte-level BPE, and SentencePiece with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["hello world, the quick brown fox jumps over the lazy dog 0123456789 ", "日本語のテキスト 你好世界 "] * 4
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level_core() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


def sentencepiece_core() -> tokenizers.Tokenizer:
    """As Llama 2's: bytes as tokens, `▁` for a space, one put before the text."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab += ["▁", *"abcdefghijklmnopqrstuvwxyz,.日本", "he", "▁he"]
    core = tokenizers.Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(vocab)},
            [("h", "e"), ("▁", "he")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


CORES = {"byte_level": byte_level_core(), "sentencepiece": sentencepiece_core()}


def save_model_directory(directory: Path) -> Path:
    """The tokenizer's files of a Hugging Face directory: byte-level, ChatML."""
    CORES["byte_level"].save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
