"""The real services on virtual time: workloads, cost models, what is recorded, tables and plots.

It holds no scheduling rule. What a simulated Conductor decides, the shipped one decides.
"""
