"""Tokenizers built from GGUF metadata, and chat templates."""

from ikpy.vocab.base import Vocab
from ikpy.vocab.builtin_templates import BUILTIN_TEMPLATES
from ikpy.vocab.stream import StreamDecoder
from ikpy.vocab.table import TokenType
from ikpy.vocab.templates import ChatTemplate

__all__ = ["BUILTIN_TEMPLATES", "ChatTemplate", "StreamDecoder", "TokenType", "Vocab"]
