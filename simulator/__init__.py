"""The real services on virtual time: workloads, cost models, what is recorded, tables and plots.

It holds no scheduling rule but that of another design, in `rivals`. What a simulated Conductor decides, the
shipped one decides.
"""
