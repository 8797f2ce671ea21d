"""Losses of an update and the ways to their gradients: the values of `training.update`.

base.py             the contract, `Objective`, which is all that the trainer knows; terms of a loss over all ranks
replay.py           running the model again after a rollout, with other weights or with a graph
grpo.py             the loss on the sampler's steps, whichever way its gradient is taken
two_phase.py        ... first the rollout, then the model again
single_pass.py      ... during the rollout
forward_process.py  another objective, on finished videos that are noised again
"""
