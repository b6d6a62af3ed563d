"""Owns a run's model definition as one archive: files, limits, digest, staging.

Does not know models, how an archive is sent, nor which user consents to its code.
Start reading at `definition.Bundle`, then `archive`; `directory` puts one on disk.
"""

from atoll.bundle.archive import MAX_BYTES
from atoll.bundle.definition import Bundle, defined_by
from atoll.bundle.directory import stage, staged

__all__ = ["MAX_BYTES", "Bundle", "defined_by", "stage", "staged"]
