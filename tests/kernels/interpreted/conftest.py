"""What all tests of interpreted kernels share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """What is allocated and not yet written holds no numbers: who reads it is found out."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
