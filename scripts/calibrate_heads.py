"""``sglang-kv calibrate`` from a checkout: find a model's retrieval heads, write its gates file.

    python scripts/calibrate_heads.py MODEL --out gates.json

docs/CALIBRATION.md says how to choose a method and how to judge the result.
"""

from __future__ import annotations

import sys

from sglang_kv.cli import main

if __name__ == "__main__":
    main(["calibrate", *sys.argv[1:]])
