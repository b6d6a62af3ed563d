"""torchft's own `DiLoCo` and `LocalSGD`, unmodified, over any exchange of ours.

`Manager` has the surface of `torchft.Manager` that these classes use. Start reading at
`manager`, then `holder`; the rules of who gives the state to whom are in `wants`.
"""

from atoll.integrations.torchft.demands import run_settings
from atoll.integrations.torchft.manager import Manager

__all__ = ["Manager", "run_settings"]
