"""torchft's own `DiLoCo` and `LocalSGD`, unmodified, over any exchange of ours.

`Manager` has the methods of `torchft.Manager` that these classes use. Start reading at
`manager`, then `island`; the rules by which islands pick the donor of a state are in
`state_transfer`.
"""

from atoll.integrations.torchft.manager import Manager
from atoll.integrations.torchft.settings import run_settings

__all__ = ["Manager", "run_settings"]
