"""The decode pool: continuous batching over KV that others computed; streams tokens."""
