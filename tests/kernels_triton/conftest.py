"""The interpreter has to be chosen before Triton is imported: its tests are a run of their own."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
