"""How runs travel between an engine's pages and segments: through shared memory, or over a socket."""
