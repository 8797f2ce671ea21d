"""A run on many GPUs.

    world.py          the processes: who is who, and what they tell each other; start.py joins them
    launch.py         torchrun, SLURM, signals, errors told once
    parallelize.py    the transformer over them, in order: checkpointing, compile, FSDP2
    ulysses.py        sequence parallelism inside the joint attention
    engine.py         gradients and optimizer: what the trainer knows of all this; torch_engine.py is the default
    deepspeed/        the same over DeepSpeed ZeRO
    failure/          the watchdog, and what is compared before ranks train as one

docs/distributed.md says how to launch; docs/performance.md counts what is communicated.
"""
