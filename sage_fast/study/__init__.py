"""The experiments of the SAGE-GRPO paper as one table that a command runs, judges and writes down.

findings.py       a measured number, and many of them in a file
claims.py         how measured numbers become a verdict
experiments.toml  the table: claims, measurements, the evidence that settles them, arms of trainings
experiments.py    reads it
measures.py       measurements without a training
trainings.py      trainings: their commands, their state, their findings
runner.py         runs what is missing, some processes at a time
drawings.py       the figures
document.py       the page
"""
