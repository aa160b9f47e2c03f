"""What every process must agree on: messages, rpc, block names and layout, cluster configuration."""
