"""Numba kernels: pure functions on arrays, each with a checked wrapper or a checked caller."""
