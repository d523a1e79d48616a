"""Batches of tokens handed to Context.decode."""

from ikpy._native.batches import Batch

__all__ = ["Batch"]
