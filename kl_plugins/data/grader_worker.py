"""The worker process of `grader`: one JSON list [right, answer] a line in, true or false a line out.

Run by its path, so it imports nothing of this package.
"""

import json
import logging
import os
import resource
import sys

MEMORY = 4 << 30  # bytes of address space; SymPy and its libraries take half a GiB


def main(seconds: float) -> None:
    """Answer until standard input ends, which it does when the process that asks ends."""
    # Below us, libraries print to standard output; the answers go through a copy that only we know.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # Math-Verify logs each expression that it cannot read
    # A boxed expression counts before one announced in words ("the final answer is"); any other formula never does.
    # No ExprExtractionConfig: it would give plain text to SymPy's parse_expr, which evaluates it as Python.
    grammar = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

    def parsed(text: str) -> list:
        return parse(text, grammar, extraction_mode="first_match", parsing_timeout=None)

    def equal(right: str, answer: str) -> bool:
        return verify(parsed(f"\\boxed{{{right}}}"), parsed(answer), timeout_seconds=None)

    equal("1", "\\boxed{1}")  # the first one compiles patterns and loads grammars, for a second
    print("ready", file=answers, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Should nobody be left to kill us. The hard limit stays, so that the next request can raise ours again.
        soft = int(used.ru_utime + used.ru_stime + seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        print(json.dumps(equal(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
