"""Tensor types: their table, numpy decoders and the permutation between plain and interleaved rows."""

from ikpy.quants import bitnet, interleaved, iqk, iquants, kquants, legacy, trellis  # noqa: F401 - register codecs
from ikpy.quants.codec import dequantize
from ikpy.quants.registry import TensorType, all_types, by_id, by_name, ftype_by_id, ftype_by_name

__all__ = ["TensorType", "all_types", "by_id", "by_name", "dequantize", "ftype_by_id", "ftype_by_name"]
