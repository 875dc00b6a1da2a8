"""The embedded demo model: two GGUF files, their hashes and a model card."""
