"""The experiments of the SAGE-GRPO paper as one table that a command runs, judges and
writes down.

findings.py       a measured number, and many of them in a file
experiments.toml  the table: claims, measurements, the evidence that settles them, arms
of trainings
claims.py         reads it, and turns measured numbers into verdicts
measures.py       measurements without a training of the network
testbed.py        trainings of the exact policy
runner.py         runs what is missing, some processes at a time
drawings.py       the figures
document.py       the page
exact_policy.py   the perfect policy of the toy world, and one with weights to train
pretrain.py       makes the base models of the toy worlds
captioned.py      what it asks of a world; shapes.py and words.py are the two
readers.py        the experiment of words, with a judge that no training sees
inexact.py        the gradient of rollouts that a less exact sampler makes
solvers.py        the evaluation by either solver
"""
