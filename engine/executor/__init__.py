"""Runs plans in launch order. On a host `runner`, on a thread of its own, and `inputs` (a plan as tensors); on a GPU
`device_runner`, on one stream.
"""
