"""The verl plugin: importing this module installs it in the current process.

Ways in, either or both (twice is harmless): the entry point group ``verl.plugins``, which pip installs, and
``VERL_USE_EXTERNAL_MODULES=kl_plugins.verl``. verl hides an entry point's failure at DEBUG level, so it is logged here.
"""

import logging

try:
    from kl_plugins.verl.adapter import install
    from kl_plugins.verl.config import KLPolicyLossConfig

    install()
except Exception:
    logging.getLogger("kl_plugins").error(
        "kl_plugins.verl did not load and changed nothing: verl runs as it is alone, and a configuration with a "
        "policy_loss.kl block will refuse to start",
        exc_info=True,
    )
    raise

__all__ = ["KLPolicyLossConfig"]
