"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) in the half-split form of Hugging Face checkpoints.

Tables are computed in float32 whatever the model's dtype, as transformers does, then rounded to it.
"""

from __future__ import annotations

import math

import torch

from engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32. llama3 scaling as published with Llama 3.1: long wavelengths are divided by `factor`, short ones
    kept, those between interpolated."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    wavelengths = 2 * math.pi / frequencies
    low_wavelength = rope.original_max_positions / rope.low_frequency_factor
    high_wavelength = rope.original_max_positions / rope.high_frequency_factor
    smooth = (rope.original_max_positions / wavelengths - rope.low_frequency_factor) / (
        rope.high_frequency_factor - rope.low_frequency_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
    between = (wavelengths <= low_wavelength) & (wavelengths >= high_wavelength)
    return torch.where(between, blended, scaled)


class RopeTable:
    """cos and sin by position, the sine's first half negated, so that rotating takes one multiply and one fused multiply-add."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        cos, sin = angles.cos(), angles.sin()
        self.half = head_dim // 2
        self.cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, 1, head_dim], for positions [T]: taken once a step, shared by all layers."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotated copy of [T, H, head_dim]."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos).addcmul_(swapped, sin)
