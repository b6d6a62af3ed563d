"""Owns the dashboard: a run in the browser of the person who looks.

Does not know where the run is: it uses a `RunClient`, as the commands do.
Start reading at `server.DashboardServer`, then `feed.RunFeed`; `page` is the browser's
part.
"""

from atoll.dashboard.feed import RunFeed
from atoll.dashboard.server import PAGE, DashboardServer
from atoll.dashboard.sessions import Sessions, WrongCode

__all__ = ["PAGE", "DashboardServer", "RunFeed", "Sessions", "WrongCode"]
