"""A run on many GPUs.

    settings.py       the `distributed` section of a configuration
    world.py          the processes: who is who, and what they tell each other
    parallelize.py    the transformer over them, in order: checkpointing, compile, FSDP2
    ulysses.py        sequence parallelism inside the joint attention
    engine.py         gradients and optimizer: what the trainer knows of all this
    deepspeed.py      the same over DeepSpeed ZeRO; deepspeed_config.py checks its file against the run,
                      deepspeed_gathering.py gathers the weights of stage 3

docs/distributed.md says how to launch; docs/scaling.md counts what is communicated.
"""
