"""One of two ranks: FSDP2's real shards of a policy and a reference, copied, saved, loaded. RANK FILE FOLDER."""

import contextlib
import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from verl.workers.engine_workers import ActorRolloutRefWorker

from kl_plugins.verl import trainer


def engine(seed):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))  # 5 rows do not halve; and buffers
    module[1].running_mean.normal_()
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    for layer in (*module, module):
        fully_shard(layer)
    mode = contextlib.nullcontext
    optimizer = torch.optim.AdamW(module.parameters())
    return SimpleNamespace(module=module, eval_mode=mode, optimizer=optimizer), whole


def full(engine):
    return {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in engine.module.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


def main(rank, file, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    (policy, theirs), (reference, ours) = engine(0), engine(1)
    worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)  # without Ray: the two engines are all that is used
    worker.actor, worker.ref = SimpleNamespace(engine=policy), SimpleNamespace(engine=reference)
    process = SimpleNamespace(worker_dict={"critic": object(), "actor_rollout_ref": worker})

    policy.module(torch.ones(2, 3)).sum().backward()  # leaves the root unsharded
    policy.optimizer.step()
    theirs = full(policy)
    assert not same(full(reference), theirs)
    trainer.save_reference(process, folder)
    trainer.replace_reference(process, reset_optimizer=True)
    assert same(full(reference), theirs)
    assert all(not getattr(v, "_local_tensor", v).any() for s in policy.optimizer.state.values() for v in s.values())
    trainer.load_reference(process, folder)
    assert same(full(reference), ours)
    assert same(full(policy), theirs)  # and is nobody's alias
    reference.module[0].bias = nn.Parameter(torch.zeros(7))
    for wrong, words in (
        (lambda: trainer.replace_reference(process, False), "differ at 1 of"),
        (lambda: trainer.load_reference(process, f"{folder}x"), "its weights are not there"),
    ):
        try:
            wrong()
        except (ValueError, FileNotFoundError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    print("well")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
