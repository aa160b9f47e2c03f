"""Measurements of the service that really runs: its processes, its HTTP, its model."""
