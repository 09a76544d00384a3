"""The flags of ``sglang-kv plan``, and the formula that its help teaches."""

from __future__ import annotations

import argparse

from sglang_kv.planner.units import DTYPES, KV_DTYPES, STATE_DTYPES

FORMULA = """\
KV bytes = 2 (K and V) x layers that keep KV x KV heads x head_dim x tokens x bytes x requests
  layers: not all! Recurrent layers keep a fixed state; sliding ones min(tokens, window)
  KV heads: of the config, not query heads; MLA keeps one latent instead, without the 2
  tokens: what the policy keeps, per layer and head, in whole pages; more while it prefills
  per device: KV heads / TP size, never below one; it fits while weights + KV + state < memory"""

SHOW = ("plan", "sweep", "outgrow", "attention", "paging")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL[,MODEL]",
        help="a folder, a config.json, ORG/NAME on the hub, or a name from --list",
    )
    what = parser.add_argument_group("what is asked of it")
    what.add_argument("--context", metavar="TOKENS", help="prompt: 128k, or 8k,32k,128k")
    what.add_argument("--new-tokens", default="0", metavar="TOKENS", help="decoded after it (0)")
    what.add_argument("--requests", default="1", metavar="COUNT", help="at once (1)")
    what.add_argument(
        "--method",
        action="append",
        metavar="NAME",
        help="a method, a preset, several with commas, a policy as JSON, or all (none)",
    )
    what.add_argument("--method-config", metavar="JSON|@FILE", help="parameters of the method")
    what.add_argument("--gates", metavar="FILE", help="head gates (default: the package's)")
    what.add_argument(
        "--assume-sparsity",
        metavar="SHARE",
        help="plan duoattention without gates, as if so many heads streamed",
    )
    how = parser.add_argument_group("how it is served")
    how.add_argument("--kv-dtype", default="auto", help=f"{', '.join(KV_DTYPES)} (the model's)")
    how.add_argument("--state-dtype", help=f"of recurrent layers: {', '.join(STATE_DTYPES)}")
    how.add_argument("--page-size", default="16", metavar="TOKENS", help="(16)")
    how.add_argument(
        "--chunk", default="8192", metavar="TOKENS", help="of a prefill; 0: none (8192)"
    )
    how.add_argument("--tp-size", default="1", metavar="COUNT", help="tensor parallelism (1)")
    where = parser.add_argument_group("where")
    where.add_argument("--device", metavar="NAME|SIZE", help="memory of each device: 192GB, h100")
    where.add_argument("--weights", metavar="SIZE", help="in place of parameters x dtype")
    where.add_argument("--weight-dtype", metavar="DTYPE", help=", ".join(DTYPES))
    where.add_argument("--parameters", metavar="COUNT", help="27B, where the config does not tell")
    where.add_argument("--reserve", default="0B", metavar="SIZE", help="for activations etc. (0)")
    out = parser.add_argument_group("what comes out")
    out.add_argument(
        "--show",
        choices=SHOW,
        help="plan: one in detail; sweep: a table; outgrow: where KV outgrows the weights; "
        "attention: MHA, GQA, MQA, MLA; paging: against reserving the maximum",
    )
    out.add_argument("--max-context", metavar="TOKENS", help="--show paging: what is reserved")
    out.add_argument("--json", action="store_true", help="plan or sweep, sizes in bytes")
    out.add_argument("--plot", metavar="FILE", help="sweep as a plot (needs matplotlib)")
    out.add_argument("--list", action="store_true", help="the catalogue")
