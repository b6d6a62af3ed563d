"""Owns a run's model definition as one archive: files, limits, digest, staging.

Does not know what a model is, how an archive travels, nor who consents to its code.
Start reading at `definition.Bundle`, then `archive`; `directory` puts one on disk.
"""

from atoll.bundle.archive import MAX_BYTES
from atoll.bundle.definition import Bundle, defined_by
from atoll.bundle.directory import stage, staged

__all__ = ["MAX_BYTES", "Bundle", "defined_by", "stage", "staged"]
