"""One hypothesis profile for all: the first call of a kernel compiles it."""

from hypothesis import settings

settings.register_profile("atoll", deadline=None)
settings.load_profile("atoll")
