"""Tests and measurements on a GPU in parts of limited time: python -m benchmarks.gpu real|bench (scripts/test_cuda)."""
