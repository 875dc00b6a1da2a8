"""Kernel backends: the same fused operations, with the same bits for a row in any company."""
