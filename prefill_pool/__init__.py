"""The prefill pool: computes the KV cache of prompts."""
