"""Measuring: speed, cost of passes, speculation against greedy decoding, and other engines.

Nothing is imported here: timed starts and the peer's process begin with this package.
"""
