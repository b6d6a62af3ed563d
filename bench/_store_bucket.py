"""A bucket in a real S3 on loopback, for `store.py`: the one that the tests start."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_ENGINE = "Nothing was measured: SeaweedFS is not here. Try: make engines"


def has_engine() -> bool:
    """Return whether there is an S3 to be started."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) is not None


@contextmanager
def bucket(folder: Path | None = None) -> Iterator[str]:
    """Give the URL of an empty bucket, which this process and its children reach.

    Each has an engine of its own, because what was removed from one stays on its disk.
    """
    sys.path.append(str(ROOT))
    from tests.store.buckets import seaweedfs

    with (
        tempfile.TemporaryDirectory(dir=folder) as home,
        seaweedfs(Path(home) / "s3") as where,
    ):
        os.environ |= {
            "AWS_ENDPOINT_URL": where["endpoint"],
            "AWS_ACCESS_KEY_ID": where["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": where["secret_access_key"],
            "AWS_REGION": where["region"],
        }
        yield f"s3://{where['bucket']}/bench"
