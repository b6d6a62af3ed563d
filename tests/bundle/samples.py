"""Small definitions of models, and archives that nobody should unpack."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from atoll.bundle import Bundle

FACTORY = b'factory = "model:make_model"\n'
MODEL = b"""
import torch
from .layers import SIZE

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh())
"""
WITH_CODE = {"bundle.toml": FACTORY, "model.py": MODEL, "layers.py": b"SIZE = 4\n"}
PLAIN = {"config.json": b'{"model_type": "gpt2"}', "tokenizer.json": b"{}"}


def written(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Return a directory that holds files."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


def a_bundle(files: Mapping[str, bytes] = PLAIN) -> Bundle:
    """Return a bundle of files, without a directory."""
    from atoll.bundle.archive import pack

    return Bundle(pack(files), dict(files))


def tiny_config(kind: str = "gpt2", **changes: object) -> dict[str, bytes]:
    """Return a `config.json` of a model that trains in a moment."""
    known: dict[str, dict[str, object]] = {
        "gpt2": {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": 1,
            "n_head": 2,
            "n_embd": 8,
            "n_positions": 16,
            "vocab_size": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        "llama": {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "vocab_size": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    }
    said = {"model_type": kind, **known[kind], **changes}
    return {"config.json": json.dumps(said).encode()}


def tar_of(
    *members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT
) -> bytes:
    """Return an archive as others write it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def member(
    name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE
) -> tuple[tarfile.TarInfo, bytes]:
    """Return one member of an archive, of whatever kind."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, "config.json"
    return info, content
