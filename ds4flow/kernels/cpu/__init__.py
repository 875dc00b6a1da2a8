"""The CPU backend: numba kernels on the weights as stored; importing it imports numba."""

from ds4flow.kernels.cpu.backend import CpuKernels

__all__ = ["CpuKernels"]
