"""Settings of all tests."""

import signal

from hypothesis import settings

# How long an example takes says something about the machine, not about the code.
settings.register_profile("kl_plugins", deadline=None)
settings.load_profile("kl_plugins")

# A shell that starts pytest in the background has it ignore Ctrl-C, and the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
