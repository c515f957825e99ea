"""OpenRLHF's own script, with the plugin's flags, up to the line that would start Ray.

Standard input: a JSON list of nested settings. Standard output, last line: for each of them the command line and the
arguments that its ``train`` gets, after all of the script's own checks; or the error. One process for all, since
importing OpenRLHF takes longer than the rest.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import runpy
import sys
import types


class Reached(BaseException):
    """`train` was called."""


def main() -> None:
    if importlib.util.find_spec("flash_attn") is None:
        os.environ |= {"KL_PLUGINS_CPU": "1", "DS_ACCELERATOR": "cpu"}
        from kl_plugins.cpu import openrlhf as cpu

        cpu.install()
    import ray

    from kl_plugins.openrlhf import command
    from kl_plugins.openrlhf import main as kl_openrlhf

    reached = []

    def is_initialized():
        reached.append(sys._getframe(1).f_locals["args"])
        raise Reached

    ray.is_initialized = is_initialized  # the first thing that `train` asks
    requests, results = json.load(sys.stdin), []
    with contextlib.redirect_stdout(io.StringIO()):
        parser = command.openrlhf_parser()
        for settings in requests:
            flat = {k: command._expand(v) for k, v in command._leaves(settings) if v is not None}
            words = command.words(flat, parser)
            sys.argv = ["kl-openrlhf", *words]
            kl_openrlhf._extend_parser()
            try:
                runpy.run_module(kl_openrlhf.ENTRY, run_name="__main__", alter_sys=True)
            except Reached:
                results.append({"words": words, "args": _plain(reached.pop())})
            except (AssertionError, SystemExit, ValueError) as error:
                results.append({"words": words, "error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results))


def _plain(node):
    if isinstance(node, (argparse.Namespace, types.SimpleNamespace)):
        return {key: _plain(value) for key, value in vars(node).items()}
    return node


if __name__ == "__main__":
    main()
