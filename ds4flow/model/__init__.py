"""The DeepSeek-V4 model: configuration, weights and forward pass."""
