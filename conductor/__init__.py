"""The Conductor: places every request over the three pools and follows it to its end."""
