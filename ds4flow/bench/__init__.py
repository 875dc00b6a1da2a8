"""Measuring: speed, cost of passes, speculation against greedy decoding, and other engines."""
