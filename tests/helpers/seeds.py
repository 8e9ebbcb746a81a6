"""Equal random numbers in every run."""

import torch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
