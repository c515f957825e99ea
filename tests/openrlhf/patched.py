"""`harness.numbers` of the OpenRLHF first on the path, without the hook: MODEL FILE."""

import sys
from pathlib import Path

import torch
from harness import Run, numbers, one_process

if __name__ == "__main__":
    import openrlhf

    one_process()
    model, file = sys.argv[1:]
    torch.save({"from": openrlhf.__file__, **numbers(lambda *flags: Run(Path(model), *flags))}, file)
