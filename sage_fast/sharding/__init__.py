"""A transformer over the ranks of a run.

parallelize.py    the transformer over them, in order: checkpointing, sequence parallelism, FSDP2; torch's engine
ulysses.py        sequence parallelism inside the joint attention
zero.py           the engine over DeepSpeed ZeRO-2
"""
