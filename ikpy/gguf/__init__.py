"""GGUF container: memory-mapped reader, atomic writer, split files."""
