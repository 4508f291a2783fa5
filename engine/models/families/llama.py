"""Llama 2 and 3."""

from __future__ import annotations

from engine.hf_config import HfConfig
from engine.models.config import ModelConfig
from engine.models.families.llama_shaped import llama_shaped


def read(hf: HfConfig) -> ModelConfig:
    return llama_shaped(hf.over({"max_position_embeddings": 2048}))
