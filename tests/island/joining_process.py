"""An island process for tests of joining: it joins, prints that, and does not train."""

from __future__ import annotations

import sys

from atoll.island.join import join_run
from atoll.testing import VectorView, vector_model


def main() -> None:
    url, elements = sys.argv[1], int(sys.argv[2])
    sys.stdout.write("joins\n")
    sys.stdout.flush()
    host = join_run(
        url, VectorView(fill=1.0), vector_model({"w": (elements,)}), island="a"
    )
    sys.stdout.write("has joined\n")
    host.leave()


if __name__ == "__main__":
    main()
