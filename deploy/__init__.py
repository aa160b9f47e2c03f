"""The `dango` command: starts the pools on one machine, and talks to them."""
