"""One hypothesis profile, and one handling of Ctrl-C, for all tests."""

import signal

from hypothesis import settings

# The first call of a kernel compiles it, which no deadline allows for.
settings.register_profile("atoll", deadline=None)
settings.load_profile("atoll")

# Whoever starts tests in the background lets them ignore Ctrl-C, and every process
# that they start inherits that; a handler is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
