"""The embedded demo model: a small trained DeepSeek-V4 and its MTP block, shipped as GGUF files."""
