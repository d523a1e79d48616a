"""A machine that executes the PTX of the kernels."""
