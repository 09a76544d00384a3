"""At start-up: the capacity plan of this server, in its log, and whether it came true."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from sglang_kv.compression import Compressor, PolicyError
from sglang_kv.planner.config import read_model
from sglang_kv.planner.memory import Serving
from sglang_kv.planner.server import server_plan
from sglang_kv.planner.units import KV_DTYPES, PlanError, parse_dtype
from sglang_kv.state import PhysicalLedger

logger = logging.getLogger(__name__)


def log_plan(ledger: PhysicalLedger, pool: Any, policy: Compressor, model_config: Any) -> None:
    """One line with the plan; a warning where ``pool`` took another amount of memory.

    A plan that cannot be made stops no server: the line says why there is none.
    """
    context = int(model_config.context_len)
    file = Path(str(model_config.model_path)) / "config.json"
    # Not SGLang's copy where there is a file: it adds notes of its own.
    config = json.loads(file.read_text()) if file.exists() else model_config.hf_config.to_dict()
    name = str(model_config.model_path).rstrip("/").split("/")[-1]
    try:
        plan = server_plan(
            read_model(config, name),
            Serving(
                kv_dtype=parse_dtype(str(pool.dtype), "dtype", ("fp32", *KV_DTYPES)),
                page_size=ledger.page_size,
                tp_size=ledger.geometry.num_ranks,
                chunk=ledger.chunk_tokens,
            ),
            policy.plan(context, ledger.geometry),
            policy=policy.name,
            pool_tokens=pool.size,
            prompt=context,
        )
    except (PlanError, PolicyError) as error:
        logger.info("no KV plan: %s", error)
        return
    logger.info("%s", plan.line)
    warning = plan.warning(sum(pool.get_kv_size_bytes()))
    if warning is not None:
        logger.warning("%s", warning)
