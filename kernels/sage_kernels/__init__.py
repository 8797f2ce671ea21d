"""Fused Triton kernels for flow-matching reinforcement learning; needs only torch and triton."""
