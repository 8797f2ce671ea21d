"""The processes of a run on many GPUs.

    start.py          processes that torchrun has started: their device, restarts, and how they join
    world.py          the joined processes, and small exchanges between them
    engine.py         gradients and optimizer as the trainer sees them
    failure.py        ranks that differ are refused, ranks that hang end

docs/distributed.md says how to launch; docs/performance.md counts what is communicated.
"""
