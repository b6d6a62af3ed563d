"""A bundle must not have code loaded without consent, however it names that code."""

from __future__ import annotations

import json

import pytest

from tests.bundle.samples import a_bundle


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": {"": "someone/kernel"}},
        {"_attn_implementation": {"text_config": "someone/kernel@main:flash"}},
        {"_attn_implementation_internal": "someone/kernel"},
        {"attn_implementation": "paged|someone/kernel"},
        {"attn_implementation": "flash_attention_2"},
        {"experts_implementation": "someone/kernel"},
        {"text_config": {"experts_implementation": {"": ["sdpa", "someone/kernel"]}}},
        {"use_kernels": True},
        {"Use_Kernel": True},
        {"kernel_config": {"kernel_mapping": {"RMSNorm": "someone/kernel:RMSNorm"}}},
        {"backbone": "someone/backbone"},
        {"backbone_config": {"backbone": "hf-hub:someone/backbone"}},
    ],
)
def test_a_kernel_in_any_place_of_a_configuration_is_code(config: object) -> None:
    """Text, table, list or nested configuration: it is code that asks for consent."""
    content = json.dumps(config).encode()

    assert a_bundle({"config.json": content}).code == ["config.json"]
