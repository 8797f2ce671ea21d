"""A run on many GPUs.

    start.py          processes that torchrun has started: their device, restarts, and how they join
    world.py          the joined processes, and small exchanges between them
    parallelize.py    the transformer over them, in order: checkpointing, sequence parallelism, FSDP2; torch's engine
    ulysses.py        sequence parallelism inside the joint attention
    engine.py         gradients and optimizer as the trainer sees them
    zero.py           the same over DeepSpeed ZeRO-2
    failure.py        ranks that differ are refused, ranks that hang end

docs/distributed.md says how to launch; docs/performance.md counts what is communicated.
"""
