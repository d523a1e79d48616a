"""ikpy: run and make quantized GGUF language models."""

__version__ = "0.1.0"
