"""Do something right after a module has been imported, whenever that is. Imports nothing heavy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def after_import(name: str, action: Action) -> None:
    """Call ``action(module)`` once module ``name`` has been executed; at once if it already has been.

    An action that raises fails the import, so that nothing can use the module without it. Asking twice for the same
    action is harmless.
    """
    actions = _finder().actions.setdefault(name, [])
    if action in actions:
        return
    actions.append(action)
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)


def _finder() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return finder


class _Finder:
    """A meta-path finder that lets the others find a module, and runs our actions after its code."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is None:
                continue
            if spec.loader is None:  # a namespace package runs no code
                return spec
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)
            return spec
        return None

    def _execute(self, execute: Action, module: ModuleType) -> None:
        execute(module)
        for action in self.actions[module.__name__]:
            action(module)
