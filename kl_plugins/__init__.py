"""KL regularisation for RLHF with the gradient you meant.

Names are resolved on first use (PEP 562): the command line, the launcher and the worker hooks live in this package
and must start without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kl_plugins.config import KLConfig
    from kl_plugins.estimators import KLEstimator, get_estimator, register_estimator, registered_estimators
    from kl_plugins.head import combined_advantages, kl_head
    from kl_plugins.metrics import kl_metrics

_HOME = {
    "KLConfig": "kl_plugins.config",
    "KLEstimator": "kl_plugins.estimators",
    "get_estimator": "kl_plugins.estimators",
    "register_estimator": "kl_plugins.estimators",
    "registered_estimators": "kl_plugins.estimators",
    "combined_advantages": "kl_plugins.head",
    "kl_head": "kl_plugins.head",
    "kl_metrics": "kl_plugins.metrics",
}

__all__ = [
    "KLConfig",
    "KLEstimator",
    "combined_advantages",
    "get_estimator",
    "kl_head",
    "kl_metrics",
    "register_estimator",
    "registered_estimators",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'kl_plugins' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *_HOME})
