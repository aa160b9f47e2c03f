"""The KVCache pool: content-addressed KV blocks in CPU memory, found by prefix, moved layer by layer."""
