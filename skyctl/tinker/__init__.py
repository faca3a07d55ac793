"""A Tinker-compatible API beside a fleet: the `tinker` SDK trains LoRA adapters and samples them.

The API process (`__main__`) puts each request on disk before it answers, a worker process
(`worker`) trains, and the fleet's own servers sample. torch is imported only in the worker's
modules.
"""
