"""Which names a bundle's files may have, on whatever system they are put."""

from __future__ import annotations

import re

MAX_NAME_BYTES = 100
"""What a tar file has room for without a header of another kind."""

MAX_DEPTH = 8

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")

WEIGHTS = (
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".npy",
    ".npz",
    ".onnx",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".safetensors",
    ".tflite",
    ".bin.index.json",
    ".safetensors.index.json",
)
"""How files that hold weights, or say where they lie, are called."""


def name_fault(name: str) -> str:
    """Return why a file cannot be in a bundle by its name; empty if it can."""
    shown = repr(name[: 2 * MAX_NAME_BYTES])
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        return f"{shown} is an absolute path. Names in a bundle are relative."
    parts = name.split("/")
    if ".." in parts:
        return f"{shown} leads out of the bundle. Name what lies in it."
    if len(name) > MAX_NAME_BYTES or len(parts) > MAX_DEPTH:
        return (
            f"{shown} has {len(name)} characters in {len(parts)} parts; a name in a "
            f"bundle has at most {MAX_NAME_BYTES} in {MAX_DEPTH}. Shorten it."
        )
    if not all(_PART.fullmatch(part) and part[-1] != "." for part in parts):
        return (
            f"{shown} cannot be a name in a bundle: its parts have letters, digits and "
            "_ . + - of ASCII, and begin with one of the first three. Rename it."
        )
    if name.lower().endswith(WEIGHTS):
        return (
            f"{shown} holds weights, and a bundle has none: the run has them. Move it "
            "out of the directory; --init FILE founds a run with weights."
        )
    return ""


class Taken:
    """Names that were met already, as a system sees them that ignores case."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._spelt: dict[str, str] = {}

    def fault(self, name: str) -> str:
        """Return why a name cannot stand beside those before it, or take it."""
        if name in self._files:
            return f"{name!r} is there twice."
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            before = self._spelt.setdefault(path.lower(), path)
            if before != path:
                return f"{path!r} and {before!r} differ in case only. Rename one."
            if path in self._files:  # in order, a file comes before what is under it
                return f"{path!r} is a file and a directory. Rename one."
        self._files.add(name)
        return ""
