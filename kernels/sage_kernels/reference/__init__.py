"""Plain PyTorch references, one per op. They are frozen: a kernel is judged by them, never the other way round."""
