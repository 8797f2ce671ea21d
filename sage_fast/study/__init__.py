"""The experiments of the SAGE-GRPO paper as one table that a command runs, judges and writes down.

findings.py      a measured number, and many of them in a file
experiments.py   the table: what is claimed, what is measured, what settles it
training_arms.py what each of its trainings changes
evidence.py      what the measured numbers say of one claim
claims.py        how that becomes a verdict
measures.py      what is measured without a training
trainings.py     trainings: their commands, whether they are finished, what they found
runner.py        runs what is missing, some processes at a time
drawings.py      the figures
document.py      the page
"""
