"""What every worker of bench/peers has in common: one JSON request a line, one JSON answer a line."""

import json
import os
import sys


def serve(run):
    """Answers until standard input ends. run(request) gives the answer; a RuntimeError becomes {"error"}."""
    # Only answers go to standard output: whatever a library prints joins standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except RuntimeError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
