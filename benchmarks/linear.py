"""The head from 1e4 to 1e8 bytes of log-probabilities: nanoseconds a token, forward and backward."""

from __future__ import annotations

from benchmarks.head import batch, forward_backward, ours
from benchmarks.measure import Result, in_turn

TOKENS = {10**4: (10, 250), 10**5: (25, 1000), 10**6: (125, 2000), 10**7: (1250, 2000), 10**8: (12500, 2000)}


def run(repeats: int) -> list[Result]:
    results = []
    for size, shape in TOKENS.items():
        data = batch(shape)
        run_once = forward_backward(ours(data, lambda m, mask: m.sum()), data)
        (result,) = in_turn("head, by size", {f"{size:.0e} bytes": run_once}, repeats)
        result.note = f"{result.milliseconds * 1e6 / (size / 4):.2f} ns a token"
        results.append(result)
    for result in results:
        result.ratio = result.milliseconds / results[0].milliseconds
    return results
