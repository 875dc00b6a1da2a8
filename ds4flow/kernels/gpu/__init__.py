"""Kernels for GPUs: Triton, one fixed tile and one fixed order of sums for any number of rows.

Nothing here is imported before the backend is asked for, so Triton stays optional.
"""
