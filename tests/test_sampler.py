"""The sampler against a twin written to be read, and the cases that broke others."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InternalError, SettingError
from engine.runtime.sampler import Draw, Sampler, fresh_seed
from engine.settings import Sampling, checked

NO_HISTORY = np.zeros(0, np.int32)
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
}
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0)


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{**NEUTRAL, **changes})


def draw(row: Any, with_settings: Sampling, seed: int = 0, history: Any = NO_HISTORY, **made_with: Any) -> int:
    logits, before = np.asarray(row, np.float32), np.asarray(history, np.int32)
    return Sampler(logits.size, **made_with).draw(logits, with_settings, seed=seed, history=before).token


def naive_distribution(row: list[float], s: Sampling) -> dict[int, float]:
    """What each id's probability is, by the documented order, in plain Python."""
    order = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    scaled = {i: (row[i] - row[order[0]]) / s.temperature for i in order}
    if s.top_k:
        order = order[: s.top_k]
    if s.top_p < 1:
        total = sum(math.exp(scaled[i]) for i in order)
        reached, count = 0.0, 0
        while count < len(order) and (count == 0 or reached < s.top_p * total):
            reached += math.exp(scaled[order[count]])
            count += 1
        order = order[:count]
    order = [i for i in order if math.exp(scaled[i]) >= s.min_p and math.exp(scaled[i]) > 0]
    total = sum(math.exp(scaled[i]) for i in order)
    probability = {i: math.exp(scaled[i]) / total for i in order}
    if s.typical_p < 1:
        entropy = -sum(p * math.log(p) for p in probability.values())
        order.sort(key=lambda i: abs(-math.log(probability[i]) - entropy))
        reached, count = 0.0, 0
        while count < len(order) and (count == 0 or reached < s.typical_p):
            reached += probability[order[count]]
            count += 1
        probability = {i: probability[i] for i in order[:count]}
        total = sum(probability.values())
        probability = {i: p / total for i, p in probability.items()}
    return probability


# ---------------------------------------------------------------- the chain (case S04)


CHAINS = [
    {},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"typical_p": 0.5},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9},
]


@pytest.mark.parametrize(("changes", "draws"), [(c, 20_000 if len(c) > 1 else 4_000) for c in CHAINS], ids=str)
def test_draws_follow_the_exact_distribution(changes: dict[str, Any], draws: int) -> None:
    """Pearson's statistic stays below its 99.99 % point."""
    s = sampling(**changes)
    row = np.random.default_rng(5).normal(size=9).astype(np.float32) * 1.5
    expected = naive_distribution(row.tolist(), s)
    sampler = Sampler(row.size)
    counts = np.bincount(
        [sampler.draw(row, s, seed=seed, history=NO_HISTORY).token for seed in range(draws)], minlength=row.size
    )
    assert {int(i) for i in np.flatnonzero(counts)} <= set(expected)
    statistic = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    degrees = max(1, len(expected) - 1)
    # Wilson and Hilferty's approximation of the chi-square quantile.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic <= limit


@settings(max_examples=300, deadline=None)
@given(
    row=st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=40),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 1000]),
    top_p=st.sampled_from([0.0, 1e-9, 0.313, 0.877, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.52, 1.0]),
    typical_p=st.sampled_from([0.233, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_only_what_the_twin_allows_is_drawn(row: list[float], seed: int, **changes: Any) -> None:
    s = sampling(**changes)
    assert draw(row, s, seed=seed) in naive_distribution(row, s)


@pytest.mark.parametrize("size", [1, 2, 3, 31, 33, 63, 64, 65, 257, 40_001])
@pytest.mark.parametrize("top_k", [0, 1, 7, 64, 1000])
def test_top_k_is_exact_for_awkward_sizes(size: int, top_k: int) -> None:
    """With the temperature high and no other filter, every one of the k likeliest can come, nothing else."""
    row = np.round(np.random.default_rng(size).normal(size=size) * 4).astype(np.float32)  # many ties
    allowed = sorted(range(size), key=lambda i: (-row[i], i))[: top_k or size]
    s = sampling(temperature=2.0, top_k=top_k)
    drawn = {draw(row, s, seed=seed) for seed in range(200)}
    assert drawn <= set(allowed)
    if len(allowed) <= 3:
        assert drawn == {i for i in allowed if row[i] > row[allowed[0]] - 8}


@pytest.mark.parametrize("row", [[0.0, 0, 9, 0], [1.0] * 50, [2.0, 5, 5, 5]], ids=["one-hot", "flat", "ties"])
@pytest.mark.parametrize("changes", [{"min_p": 1.0}, {"top_p": 0.0}, {"typical_p": 1e-9}, {"top_k": 1}], ids=str)
def test_something_always_survives(row: list[float], changes: dict[str, Any]) -> None:
    assert draw(row, sampling(**changes), seed=3) in naive_distribution(row, sampling(**changes))


def test_top_p_0_and_min_p_1_take_the_likeliest() -> None:
    row = [0.0, 3.0, 2.9, -1.0]
    for changes in ({"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}):
        assert {draw(row, sampling(**changes), seed=seed) for seed in range(50)} == {1}


# ---------------------------------------------------------------- greedy (case S01)


def test_temperature_0_takes_the_lowest_of_equals_whatever_the_rest_says() -> None:
    row = [1.0, 3.0, 3.0, -50.0]
    for temperature, seed, top_p in itertools.product([0.0, 1e-6], [1, 2, 3], [0.0, 0.5, 1.0]):
        assert draw(row, sampling(temperature=temperature, top_p=top_p), seed=seed) == 1


def test_huge_logits_and_other_float_types() -> None:
    huge = np.array([1, 3, 3, -50], np.float64) * 1e30
    for temperature in (0.0, 1e-6, 0.7, 2.0):
        assert draw(huge, sampling(temperature=temperature, top_k=2)) in (1, 2)
    for kind in (np.float16, np.float32, np.float64):
        logits = np.array([1, 3, 3, -50], kind)
        assert Sampler(4).draw(logits, GREEDY, seed=0, history=NO_HISTORY).token == 1


def test_the_row_is_only_read() -> None:
    row = np.array([1.0, 2.0, 3.0], np.float32)
    row.flags.writeable = False
    Sampler(3, missing=np.array([2])).draw(row, Sampling(), seed=0, history=np.array([1, 1]), alternatives=2)
    assert row.tolist() == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------- what is not a number (case S03)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_k": 2}, {}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize(
    "row", [[1, np.nan, 3], [np.nan] * 3, [-np.inf] * 3, [np.nan, np.inf, 0]], ids=["nan", "all-nan", "none", "nan-inf"]
)
def test_a_row_that_is_not_numbers_is_an_error(row: list[float], changes: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match="not numbers"):
        draw(row, sampling(**changes), history=[0, 2])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_plus_infinity_wins(temperature: float) -> None:
    drawn = {draw([1, np.inf, np.inf], sampling(temperature=temperature, top_k=3), seed=seed) for seed in range(30)}
    assert drawn == ({1} if temperature == 0 else {1, 2})


def test_minus_infinity_never_comes() -> None:
    row = [-np.inf, 0.0, -np.inf, 0.0]
    for changes in ({}, {"top_k": 4}, {"top_p": 0.99}, {"typical_p": 0.99}):
        assert {draw(row, sampling(temperature=2.0, **changes), seed=seed) for seed in range(40)} == {1, 3}


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_k": 3}, {}, {"top_p": 0.9}], ids=str)
def test_an_id_without_a_token_never_comes_even_when_its_logit_is_damaged(changes: dict[str, Any]) -> None:
    missing = np.array([1, 3])
    for damaged in (9.0, np.inf, np.nan):
        row = [0.5, damaged, 1.0, damaged]
        drawn = {draw(row, sampling(**changes), seed=seed, missing=missing) for seed in range(20)}
        assert drawn <= {0, 2}


# ---------------------------------------------------------------- penalties (case S05)


def penalised(history: list[int], **changes: Any) -> list[float]:
    """The row after penalties, read back through the logits at which greedy changes its mind."""
    sampler = Sampler(4, unpenalised=frozenset())
    row = np.array([2, -2, 0, 5], np.float32)
    sampler._penalise(row, sampling(**changes), np.array(history, np.int32))
    return row.tolist()


def test_repetition_divides_the_positive_and_multiplies_the_negative_once_each() -> None:
    assert penalised([0, 1, 1, 2], repetition_penalty=2.0) == [1, -4, 0, 5]
    assert penalised([0, 1, 1, 2], repetition_penalty=0.5) == [4, -1, 0, 5]


def test_the_window_counts_back_from_the_last_token() -> None:
    assert penalised([0, 1, 1, 2], repetition_penalty=2.0, repetition_window=0) == [2, -2, 0, 5]
    assert penalised([0, 1, 1, 2], repetition_penalty=2.0, repetition_window=1) == [2, -2, 0, 5]
    assert penalised([0, 1, 1, 2], repetition_penalty=2.0, repetition_window=2) == [2, -4, 0, 5]
    assert penalised([0, 1, 1, 2], repetition_penalty=2.0, repetition_window=4096) == [1, -4, 0, 5]
    assert penalised([], repetition_penalty=2.0) == [2, -2, 0, 5]


def test_presence_once_and_frequency_each_time() -> None:
    assert penalised([0, 1, 1, 2], presence_penalty=0.5) == [1.5, -2.5, -0.5, 5]
    assert penalised([0, 1, 1, 2], frequency_penalty=0.5) == [1.5, -3, -0.5, 5]
    assert penalised([1, 1], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=-0.5) == [2, -4, 0, 5]


def test_end_tokens_are_spared() -> None:
    history = [3] * 50
    s = sampling(temperature=0.0, repetition_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0)
    row = [2.0, -2.0, 0.0, 2.5]
    assert draw(row, s, history=history) == 0
    assert draw(row, s, history=history, unpenalised=frozenset({3, 99})) == 3


# ---------------------------------------------------------------- seeds


def test_a_seed_repeats_and_each_position_has_its_own_number() -> None:
    flat = np.zeros(1000, np.float32)
    s = sampling()

    def answer(seed: int) -> list[int]:
        return [draw(flat, s, seed=seed, history=np.zeros(n, np.int32)) for n in range(40)]

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)
    assert len(set(answer(7))) > 30


def test_answers_are_pinned() -> None:
    """Changing one id here changes answers that people asked to be repeatable."""
    row = np.linspace(-3, 3, 500).astype(np.float32)
    s = sampling(temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, typical_p=0.97, repetition_penalty=1.1)
    history = list(range(480, 500))
    ids = [draw(row, s, seed=2**63 - 1, history=history[:n]) for n in range(12)]
    assert ids == PINNED_IDS


def test_fresh_seeds_differ_and_are_allowed() -> None:
    seeds = {fresh_seed() for _ in range(20)}
    assert len(seeds) == 20
    for seed in seeds:
        Sampling(seed=seed)


# ---------------------------------------------------------------- reports


def test_logprobs_are_the_raw_models() -> None:
    row = np.array([1.0, 3.0, 2.0, 99.0], np.float32)
    sampler = Sampler(4, missing=np.array([3]))
    s = sampling(temperature=0.0, repetition_penalty=2.0, top_k=1)
    found = sampler.draw(row, s, seed=0, history=np.array([1]), alternatives=5)
    total = math.log(sum(math.exp(x) for x in (1, 3, 2)))
    assert found.token == 2
    assert math.isclose(found.logprob, 2 - total, rel_tol=1e-12)
    assert [i for i, _ in found.alternatives] == [1, 2, 0, 3]
    assert [round(p, 9) for _, p in found.alternatives[:3]] == [round(x - total, 9) for x in (3, 2, 1)]
    assert found.alternatives[3][1] == -math.inf
    assert sampler.draw(row, s, seed=0, history=np.array([1])) == Draw(2)


def test_logprobs_of_an_infinite_row_are_numbers() -> None:
    row = np.array([1, np.inf, np.inf], np.float32)
    found = Sampler(3).draw(row, GREEDY, seed=0, history=NO_HISTORY, alternatives=2)
    assert found.token == 1
    assert math.isclose(found.logprob, math.log(0.5))


# ---------------------------------------------------------------- settings from outside (case S02)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["temperature"], [-1, -1e-9, 2.5, 1e6, "1", True, None, math.nan, math.inf]),
        *itertools.product(["top_p", "min_p"], [-1, -1e-9, 1.0001, 2, math.nan]),
        *itertools.product(["top_k"], [-1, 10**9, 1.5, "40"]),
        *itertools.product(["typical_p"], [0, -1, 1.5]),
        *itertools.product(["repetition_penalty"], [-1, 0, 1e-9, 1e9, math.inf]),
        *itertools.product(["seed"], [-2, 2**63, 2**64, 1.5, "a"]),
        *itertools.product(["max_tokens"], [0, -1, 1.5, 10**9]),
        *itertools.product(["presence_penalty", "frequency_penalty"], [-2.1, 2.1]),
        *itertools.product(["repetition_window"], [-1, 10**6]),
    ],
)
def test_senseless_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        checked(Sampling, {name: value})


def test_every_allowed_extreme_draws_a_token() -> None:
    row = np.random.default_rng(0).normal(size=300).astype(np.float32) * 10
    sampler = Sampler(300)
    for temperature, top_k, top_p, min_p, typical, penalty in itertools.product(
        [0.0, 1e-9, 1e-5, 2.0], [0, 1, 1000], [0.0, 1e-9, 1.0], [0.0, 1.0], [1e-9, 1.0], [0.1, 1.0, 2.0]
    ):
        s = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical,
            repetition_penalty=penalty,
            presence_penalty=2.0,
            frequency_penalty=-2.0,
        )
        found = sampler.draw(row, s, seed=2**63 - 1, history=np.arange(300))
        assert 0 <= found.token < 300


def test_a_large_vocabulary_takes_less_than_a_millisecond() -> None:
    """0.3 ms on a quiet machine with the default settings; the bound leaves room for a busy one."""
    row = np.random.default_rng(0).normal(size=151_936).astype(np.float32) * 3
    sampler = Sampler(row.size, missing=np.arange(151_665, row.size))
    history = np.arange(1000)
    sampler.draw(row, Sampling(), seed=1, history=history)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        sampler.draw(row, Sampling(), seed=1, history=history)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3


PINNED_IDS = [458, 480, 499, 499, 490, 460, 494, 477, 462, 481, 498, 498]
