"""CUDA backend: devices, kernels and the execution of split graphs."""
