"""Losses of an update and the ways to their gradients: the values of `training.update`.

base.py             the contract, `Objective`, which is all that the trainer knows; terms of a loss over all ranks
grpo.py             the loss on the sampler's steps, and its gradient by running the model again after the rollout
single_pass.py      ... or during the rollout
forward_process.py  another objective, on finished videos that are noised again
"""
