"""What every test of this folder needs."""

from __future__ import annotations

import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
