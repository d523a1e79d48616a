"""Tokenizers built from GGUF metadata, and chat templates."""

from ikpy.vocab.base import Vocab
from ikpy.vocab.stream import StreamDecoder
from ikpy.vocab.table import TokenType

__all__ = ["StreamDecoder", "TokenType", "Vocab"]
