"""The policy: the guided velocity of a model, and what is trained of it."""
