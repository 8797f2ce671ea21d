"""Counts of the guard without a GPU: operations, bytes, launches, waits, compiled code,
imports, memory.
"""
