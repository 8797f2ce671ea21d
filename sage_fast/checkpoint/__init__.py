"""Checkpoints that are either complete or not there, in one format for one process and
many.

    checkpoints/update-000040/
        shards/          every tensor, in torch's distributed checkpoint format (DCP), by "group.name": weights.*,
                         anchor.*, ema.* and optimizer.*; each rank has written a part
        lora/            the adapter that was evaluated (averaged, with EMA on), in diffusers' layout
        state.json       counters, KL controller, schedule, configuration
        manifest.json    size and SHA-256 of every other file and of itself, written last
    checkpoints/best.json  update and score of the best evaluation, whose checkpoint is kept

A checkpoint is written into a hidden folder, synced, and renamed; a folder without a
manifest, or with a file that does not match it, is never resumed from. One that cannot
be read is another matter: it may be whole, and stops the run. Any number of processes
can read it, whatever number has written it, and reading it runs no code.

    folder.py       names, the manifest, the check of every byte
    writer.py       `CheckpointWriter`: copies the tensors and writes them, if wanted while training goes on
    reader.py       `Checkpoint`: what is in one, read into tensors of any sharding, or a tensor at a time
"""
