"""KV-cache policies for Hugging Face transformers."""
