"""All benchmarks, one after the other, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    "bits",
    "host_syncs",
    "peak_memory",
    "step_time",
    "stage_overhead",
    "compile_time",
    "first_step",
    "drawing",
    "planning",
    "frontier",
    "accumulation",
    "pipeline",
    "pipeline_memory",
    "published",
    "published_parallel",
    "offloaded",
    "published_kernels",
    "host_tier",
    "longest",
    "host_optimizer",
    "processes",
    "growth",
    "tiling",
    "tiling_vocabulary",
    "inductor",
    "budget_curve",
    "scripts",
    "before",
)


def main() -> None:
    failed = [name for name in BENCHMARKS if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
