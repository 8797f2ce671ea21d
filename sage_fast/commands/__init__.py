"""One module per command of `sage-fast`: `add_parser` declares its options, `run`
carries it out.

Heavy imports happen inside `run`, so that `--help` and a wrong option answer at once.
"""
