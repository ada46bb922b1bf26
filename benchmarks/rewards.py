"""What scoring one sample costs, and what it adds that each sample has a process of its own.

    python benchmarks/rewards.py [--samples 200] [--json FILE]

One reward process, one sample after another. CPU: of the worker and the forks below it. Wall: of the round trip from the pool.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import psutil
from figures import Figure, finish, parser

from asyncflow.rewards import REWARDS
from asyncflow.rewards.base import RewardPart, Sample
from asyncflow.rewards.pool import RewardPool
from asyncflow.sandbox.limits import ProcessLimits

TIMES = ("user", "system", "children_user", "children_system")


async def cost(part: RewardPart, sample: Sample, count: int) -> tuple[float, float]:
    """Milliseconds of wall and CPU time of a sample."""
    pool = RewardPool([part], ProcessLimits(30, 1 << 30), num_workers=1, name="benchmark")
    await pool.start()
    try:
        await pool.score(sample)
        (worker,) = (child for child in psutil.Process().children() if "asyncflow.rewards.worker" in child.cmdline())
        before, start = worker.cpu_times(), time.perf_counter()
        for _ in range(count):
            await pool.score(sample)
        seconds, after = time.perf_counter() - start, worker.cpu_times()
        cpu = sum(getattr(after, name) - getattr(before, name) for name in TIMES)
        return 1e3 * seconds / count, 1e3 * cpu / count
    finally:
        await pool.close()


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=200)
    options = arguments.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "own.py"
        file.write_text("def score(sample):\n    return 1.0\n")
        number = Sample("", "#### 9", {"answer": "9"}, True)
        expression = Sample("", r"\boxed{\sqrt{8}}", {"answer": r"2\sqrt{2}"}, True)
        for name, part, sample in (
            ("final_answer, in the worker itself", RewardPart("a", REWARDS["final_answer"]), number),
            ("a function of one's own, in a fork", RewardPart("a", f"{file}:score"), number),
            ("maths, a number, in a fork", RewardPart("a", REWARDS["maths"]), number),
            ("maths, an expression, in a fork", RewardPart("a", REWARDS["maths"]), expression),
        ):
            wall, cpu = asyncio.run(cost(part, sample, options.samples))
            figures += [Figure(f"{name}: CPU", cpu, "ms"), Figure(f"{name}: wall", wall, "ms")]
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
