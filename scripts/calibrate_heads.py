"""Find a model's retrieval heads without training, and write them as a gates file.

    python scripts/calibrate_heads.py MODEL --out gates.json
    python scripts/calibrate_heads.py MODEL --check gates.json     # does it still find passkeys?

The work is in `sglang_kv.calibration`.
"""

from __future__ import annotations

from sglang_kv.calibration.command import main

if __name__ == "__main__":
    main()
