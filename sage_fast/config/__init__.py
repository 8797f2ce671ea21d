"""Run configuration: typed settings, the YAML they come from, and the names of
pluggable parts.
"""
