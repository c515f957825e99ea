"""One of two data-parallel ranks of `test_two_ranks_against_one`: MODEL FOLDER PORT RANK."""

import sys
from pathlib import Path

import torch
from harness import Run, as_flags, one_process

from kl_plugins.openrlhf import hook

if __name__ == "__main__":
    model, folder, port, rank = sys.argv[1:]
    hook.setup()
    one_process(int(rank), 2, int(port))
    run = Run(Path(model), *as_flags({"estimator": "k2", "correction": "clip", "credit": "return"}), micro="2")
    half = slice(0, 2) if rank == "0" else slice(2, 4)
    status = run.train(run.experience(half))
    result = {"gradients": run.gradients_by_row(), "rho_max": status["kl/rho_max"], "k2": status["kl/k2"]}
    torch.save(result, Path(folder) / f"{rank}.pt")
