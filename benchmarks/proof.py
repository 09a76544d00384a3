"""That an answer is of the policy that was asked for, every parameter of it."""

from __future__ import annotations

import json
from typing import Any

from sglang_kv.compression import parse_policy


class NotProved(Exception):
    """An arm did not run what it says."""


def parameters_of(policy: dict[str, Any]) -> dict[str, Any]:
    """All parameters of a policy, defaults included, as an answer has to carry them."""
    found: dict[str, Any] = json.loads(json.dumps(parse_policy(policy).parameters))
    return found


def prove_policy(answer: dict[str, Any], policy: dict[str, Any] | None) -> dict[str, Any] | None:
    """That an answer reports the policy, every parameter of it; its report.

    Args:
        answer: of ``/generate``.
        policy: what was asked for; None: nothing, of stock SGLang.

    Raises:
        NotProved: another was applied, or one where none was asked for.
    """
    report: dict[str, Any] | None = answer["meta_info"].get("kv_compression")
    if policy is None:
        if report is not None:
            raise NotProved(f"stock SGLang reports a policy: {report}")
        return None
    asked = (parse_policy(policy).name, parameters_of(policy))
    applied = report and (report["method"], report["parameters"])
    if applied != asked:
        said = f"asked for {asked[0]} {asked[1]}, applied was {applied}"
        if report and report.get("overridden"):
            said += "; the server overrides its clients (--kv-compression-override server)"
        raise NotProved(said)
    return report


class Proofs:
    """What the answers of one suite say was applied, by the policy that was asked for.

    Where a policy folds differs from prompt to prompt in a suite: ``fold_at`` is compared in each
    answer, and left out here.
    """

    def __init__(self) -> None:
        self._answers: dict[str, int] = {}

    def add(self, policy: dict[str, Any]) -> None:
        """An answer that `prove_policy` has found to be this policy's."""
        key = _without_fold(policy)
        self._answers[key] = self._answers.get(key, 0) + 1

    def of(self, policy: dict[str, Any]) -> dict[str, Any]:
        """The proof of an arm: method, parameters, and how many answers reported them.

        Raises:
            NotProved: there is no such answer.
        """
        key = _without_fold(policy)
        if key not in self._answers:
            raise NotProved(f"no answer is of {policy}")
        method, parameters = json.loads(key)
        return {"method": method, "parameters": parameters, "answers": self._answers[key]}


def _without_fold(policy: dict[str, Any]) -> str:
    parameters = {k: v for k, v in parameters_of(policy).items() if k != "fold_at"}
    return json.dumps([parse_policy(policy).name, parameters], sort_keys=True)
