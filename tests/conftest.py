import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
torch.set_num_threads(1)  # the problems are tiny, and bitwise comparisons need one order of summation


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32, "a test changed the default dtype"
