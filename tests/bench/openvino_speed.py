"""OpenVINO GenAI's speed on an exported folder, as one JSON object; run by `tests.bench.peers` in its own process.

    python -P tests/bench/openvino_speed.py FOLDER --threads N

Greedy, without ends, prompts of random tokens, its paged attention.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="OpenVINO GenAI's speed.")
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(
        options.folder, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=options.threads
    )
    random = np.random.default_rng(0)

    def answers(prompt_tokens: int, gen_tokens: int, together: int = 1) -> tuple[float, float, float]:
        """Seconds in all and to the first token, seconds a token after it."""
        ids = random.integers(300, 20_000, (together, prompt_tokens), np.int64)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = gen_tokens, True, False
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        begin_s = time.perf_counter()
        metrics = pipeline.generate(inputs, config).perf_metrics
        seconds = time.perf_counter() - begin_s
        durations = [float(duration) / 1e6 for duration in metrics.raw_metrics.m_durations] or [0.0]
        return seconds, metrics.get_ttft().mean / 1000, median(durations)

    answers(32, 8)
    found = {"decode": 1 / answers(32, 128)[2], "depth 4096": 1 / answers(4096, 24)[2]}
    for tokens in (512, 2048):
        found[f"prefill {tokens}"] = tokens / answers(tokens, 2)[1]
    first, whole = answers(32, 1, 8)[0], answers(32, 65, 8)[0]
    found["batch 8"] = 64 * 8 / (whole - first)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
