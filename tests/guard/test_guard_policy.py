"""The policy file: what it holds comes back exactly, and each fault is one sentence with the way out."""

from __future__ import annotations

from decimal import Decimal

import pytest

from assay.errors import InputError
from assay.guard.policy import Policy, from_plain, from_yaml, plain

SMALL = 'name: small\nmachine: {gpus: 8}\nceiling: {usd_per_billion_positions: "12.10"}\n'


def policy(extra: str = "") -> Policy:
    return from_yaml(SMALL + extra, "small.yaml")


def test_a_policy_survives_plain_data() -> None:
    full = policy('prices: [{fixed: {value: "1.99", unit: gpu-hour}}, {command: {argv: [price, --now]}}]\n'
                  'reserve: {usd: "25"}\nrates: {EUR: {usd: "1.08", source: ECB, date: "2026-11-11"}}\n'
                  'alarms: [{webhook: {url: "https://example.org/x"}}]\n'
                  "dead_man: {after_seconds: 600, stop: true}\n")  # fmt: skip
    assert from_plain(plain(full), "again") == full
    assert full.ceiling is not None
    assert full.ceiling.usd_per_billion_positions == Decimal("12.10")
    assert full.readings == 4


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("readngs: 3\n", "nearest known key is readings"),
        ("zones: {max_usd_per_hr: \"1\"}\n", "nearest known key is zones.max_usd_per_hour"),
        ("prices: [{fixed: {valu: \"1\", unit: gpu-hour}}]\n", "nearest known key is prices.0.fixed.value"),
        ("cap_usd: 500\n", "in quotes"),
        ("cap_usd: 500.5\n", "in quotes"),
        ('cap_usd: "-1"\n', "at least 0"),
        ('cap_usd: "NaN"\n', "at least 0"),
        ('cap_usd: "1e99"\n', "digits"),
        ('cap_usd: "1e13"\n', "at most 1,000,000,000,000"),
        ("interval_seconds: 9007199254740991\n", "at most 315,360,000"),
        ("zones: {memory_seconds: 99999999999}\n", "at most 315,360,000"),
        ("prices: [{command: {argv: [x], timeout_seconds: 9999999999}}]\n", "at most 315,360,000"),
        ('resume: {fraction: "1.1"}\n', "at most 1"),
        ('jump_factor: "1"\n', "above 1"),
        ("prices: [{}]\n", "exactly one of fixed, csv"),
        ('prices: [{fixed: {value: "1", unit: gpu-hour}, command: {argv: [a]}}]\n', "fixed and command"),
        ('prices: [{fixed: {value: "1", unit: gpu-day}}]\n', "machine-hour"),
        ('prices: [{csv: {path: ../x, zone: a}}]\n', "does not leave"),
        ("window_seconds: 100\n", "at least one interval_seconds"),
        ("reserve: {usd: 3}\n", "in quotes"),
        ("reserve: none\n", "reserve is 'none'; allowed are computed and"),
        ('rates: {EUR: {usd: "1.08", source: ECB, date: yesterday}}\n', "a date"),
        ('rates: {EUR: {usd: "1.08", date: "2026-11-11"}}\n', "rates.EUR.source is missing"),
        ("prices: [{runpod: {gpu: NVIDIA H200, pod: abc}}]\n", "pod and gpu"),
    ],
)  # fmt: skip
def test_a_fault_is_one_sentence(extra: str, said: str) -> None:
    with pytest.raises(InputError) as fault:
        policy(extra)
    assert str(fault.value).startswith("small.yaml: ")
    assert said in str(fault.value)


@pytest.mark.parametrize("text", ["3\n", "[1]\n", "a: &b 1\n", "name: a\nname: b\n"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^x\.yaml: "):
        from_yaml(text, "x.yaml")
