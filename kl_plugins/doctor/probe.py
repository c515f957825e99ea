"""What is asked of every node. Travels by value, so that a node without this package can still answer."""


def probe(verl: bool, openrlhf: bool) -> dict:
    """Report on kl_plugins in a fresh worker process; never raises.

    Args:
        verl: also ask whether verl's loss goes through the plugin.
        openrlhf: also ask whether OpenRLHF's worker hook installs.

    Returns:
        ``python``, and as far as things went ``version``, ``path``, ``gradient`` (of the head on a fixed input),
        ``verl``, ``openrlhf`` ("ok" or what is wrong), ``error`` (why it stopped).
    """
    import platform
    import sys
    import traceback

    report = {"python": f"{platform.python_version()} at {sys.executable}"}
    try:
        import kl_plugins

        report |= {"version": kl_plugins.__version__, "path": kl_plugins.__path__[0]}
        import torch

        report["torch"] = torch.__version__
        logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        kl_plugins.kl_head(
            logp,
            torch.tensor([[-1.2, -2.4]]),
            mask=torch.ones(1, 2),
            config=kl_plugins.KLConfig(estimator="k2", correction="clip"),
            old_logp=torch.tensor([[-1.5, -1.9]]),
        ).sum().backward()
        report["gradient"] = logp.grad.flatten().tolist()
    except Exception as error:
        return report | {"error": "".join(traceback.format_exception_only(error)).strip()}
    if verl:
        try:
            import verl as framework  # noqa: F401
            from verl.workers.utils import losses

            wrapped = hasattr(losses.ppo_loss, "__kl_plugins__")
            report["verl"] = "ok" if wrapped else "verl is imported, and its ppo_loss is verl's own"
        except Exception as error:
            report["verl"] = "".join(traceback.format_exception_only(error)).strip()
    if openrlhf:
        try:
            from kl_plugins.openrlhf import hook

            hook.setup()
            report["openrlhf"] = "ok"
        except Exception as error:
            report["openrlhf"] = "".join(traceback.format_exception_only(error)).strip()
    return report
