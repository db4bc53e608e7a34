"""Text in, tokens out and back: tokenizer, chat template, incremental detokenizer, stop strings."""

from pdserve.text.answer import AnswerText, TextDelta
from pdserve.text.detokenizer import Detokenizer
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer

__all__ = ["AnswerText", "Detokenizer", "StopStrings", "TextDelta", "Tokenizer"]
