"""DeepSpeed ZeRO-2 and 3 as the engine of a run."""
