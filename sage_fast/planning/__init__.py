"""Costs of a configuration before anything is launched: memory, work and time, and what
would make it fit.
"""
