"""Hugging Face folders and GGUF files to jaxkv checkpoints, and back."""
