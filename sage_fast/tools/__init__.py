"""What the commands beside `train` do: generate, evaluate in pairs, export, profile, check a machine."""
