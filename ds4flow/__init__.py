"""ds4flow: exact speculative decoding for DeepSeek-V4 GGUF models, declared in YAML."""

__version__ = "0.1.0"
