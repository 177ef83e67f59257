"""Triton kernels for fine-tuning language models: one file an op, each with its reference and its CASE.

Depends on torch, triton and the standard library only. Without Triton, and for tensors on a CPU, every op
runs its torch path, which computes the same function.
"""
