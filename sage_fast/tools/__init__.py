"""The commands beside `train`: generate, evaluate in pairs, export, profile, check a
machine.
"""
