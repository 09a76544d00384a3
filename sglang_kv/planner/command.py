"""``sglang-kv plan``: its flags, and which table they ask for."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from sglang_kv.compression import PolicyError, method_names
from sglang_kv.planner import views
from sglang_kv.planner.arguments import FORMULA, add_arguments
from sglang_kv.planner.capacity import CapacityPlan, Device, make_plan
from sglang_kv.planner.find import catalogue, existing, find_model
from sglang_kv.planner.memory import Serving, model_gates, weight_bytes
from sglang_kv.planner.model import Model
from sglang_kv.planner.render import detail, table
from sglang_kv.planner.units import (
    DEVICES,
    DTYPES,
    KV_DTYPES,
    STATE_DTYPES,
    PlanError,
    parse_device,
    parse_dtype,
    parse_parameters,
    parse_size,
)
from sglang_kv.planner.values import (
    gates_file,
    json_object,
    parts,
    share,
    text_or_file,
    token_list,
    tokens,
    whole_number,
)
from sglang_kv.presets import PRESETS


def add_parser(commands: Any) -> None:
    """``plan`` among the commands of ``sglang-kv``."""
    parser = commands.add_parser(
        "plan",
        help="how much KV memory a model, its traffic and a policy take, and who fits",
        description=FORMULA,
        epilog="k is 1,024 tokens. GB is 10^9 bytes, GiB 2^30. Devices: " + ", ".join(DEVICES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print what ``args`` ask for; 2 and one line on stderr where it cannot be had."""
    try:
        print(answer(args))
    except (PlanError, PolicyError) as error:
        print(f"sglang-kv plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def output(*argv: str) -> str:
    """What ``sglang-kv plan`` prints for such arguments; raises what `answer` raises."""
    parser = argparse.ArgumentParser(prog="sglang-kv plan")
    add_arguments(parser)
    return answer(parser.parse_args(argv))


def answer(args: argparse.Namespace) -> str:
    """What is printed."""
    if args.list:
        if args.json:
            raise PlanError("--json: there is none of --list")
        return models_text()
    if not args.model:
        raise PlanError("MODEL: missing (a path, ORG/NAME, or a name from --list)")
    request = Request(args)
    show = args.show or ("plan" if request.is_one else "sweep")
    if args.json and show not in ("plan", "sweep"):
        raise PlanError(f"--json: there is none of --show {show}")
    if args.max_context is not None and show != "paging":
        raise PlanError("--max-context: belongs to --show paging")
    if args.plot is not None and show != "sweep":
        raise PlanError("--plot: needs a sweep, that is several contexts, methods or models")
    if show == "sweep":
        found = views.sweep(request.models, request.specs, request.contexts, request.plan)
        if args.plot is not None:
            views.plot(found, args.plot)
        return json.dumps(found.as_json(), indent=2) if args.json else views.sweep_text(found)
    model, spec = request.one_model(show), request.one_spec(show)
    if show == "attention":
        return views.attention_kinds(model, request.serving(model), request.contexts)
    if show == "paging":
        most = model.context
        if args.max_context is not None:
            most = tokens(args.max_context, "--max-context")
        if most is None:
            raise PlanError("--max-context: missing, and the config names no context")
        return views.paging(request.plan, model, spec, request.contexts, most)
    plan = request.plan(model, spec, request.one_context(show))
    if show == "outgrow":
        return views.outgrow(plan)
    return json.dumps(plan.as_json(), indent=2) if args.json else detail(plan)


class Request:
    """The flags, checked and in the planner's terms."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        names = [name.strip() for name in args.model.split(",") if name.strip()]
        # A path may hold a comma.
        self.models = (
            [find_model(args.model)]
            if existing(args.model) is not None
            else [find_model(name) for name in names]
        )
        if not self.models:
            raise PlanError("MODEL: missing (a path, ORG/NAME, or a name from --list)")
        self.contexts = self._contexts()
        self.specs = self._specs()
        self.new = tokens(args.new_tokens, "--new-tokens", least=0)
        self.requests = whole_number(args.requests, "--requests")
        self.page_size = whole_number(args.page_size, "--page-size")
        self.tp_size = whole_number(args.tp_size, "--tp-size")
        self.chunk = tokens(args.chunk, "--chunk", least=0) or None
        self.reserve = parse_size(args.reserve, "--reserve")
        self.sparsity = share(args.assume_sparsity, "--assume-sparsity")
        self.gates = None if args.gates is None else gates_file(args.gates)

    @property
    def is_one(self) -> bool:
        return len(self.models) == len(self.contexts) == len(self.specs) == 1

    def one_model(self, show: str) -> Model:
        return self._one(self.models, "MODEL", f"--show {show}")

    def one_spec(self, show: str) -> Any:
        return self._one(self.specs, "--method", f"--show {show}")

    def one_context(self, show: str) -> int:
        return self._one(self.contexts, "--context", f"--show {show}")

    @staticmethod
    def _one(values: list[Any], flag: str, what: str) -> Any:
        if len(values) != 1:
            raise PlanError(f"{flag}: {what} takes one, got {len(values)}")
        return values[0]

    def plan(self, model: Model, spec: Any, context: int) -> CapacityPlan:
        if isinstance(spec, str) and spec in PRESETS:
            has_gates = self.gates is not None or model_gates(model) is not None
            spec = PRESETS[spec].policy(has_gates=has_gates)
        return make_plan(
            model,
            spec,
            self.serving(model),
            self._device(model),
            prompt=context,
            new=self.new,
            requests=self.requests,
            gates=self.gates,
            sparsity=self.sparsity,
        )

    def serving(self, model: Model) -> Serving:
        kv = self.args.kv_dtype
        own = model.dtype if model.dtype in KV_DTYPES else "bf16"
        state = self.args.state_dtype
        return Serving(
            kv_dtype=own if kv == "auto" else parse_dtype(kv, "--kv-dtype", KV_DTYPES),
            state_dtype=None
            if state is None
            else parse_dtype(state, "--state-dtype", STATE_DTYPES),
            page_size=self.page_size,
            tp_size=self.tp_size,
            chunk=self.chunk,
        )

    def _device(self, model: Model) -> Device:
        args = self.args
        dtype = args.weight_dtype
        if dtype is not None:
            dtype = parse_dtype(dtype, "--weight-dtype", tuple(DTYPES))
        if args.parameters is not None:
            model = replace(model, parameters=parse_parameters(args.parameters, "--parameters"))
        weights = (
            weight_bytes(model, dtype)
            if args.weights is None
            else parse_size(args.weights, "--weights")
        )
        memory = None if args.device is None else parse_device(args.device)
        if memory is not None and weights is None:
            raise PlanError(
                f"--weights: not known for {model.name}; give --weights SIZE, or --parameters "
                "COUNT and --weight-dtype"
            )
        return Device(memory, weights, self.reserve)

    def _contexts(self) -> list[int]:
        text = self.args.context
        if text is None:
            known = {model.context for model in self.models}
            if None in known or len(known) > 1:
                raise PlanError("--context: missing (these models have no one context length)")
            return [context for context in known if context is not None]
        return token_list(text, "--context")

    def _specs(self) -> list[Any]:
        specs: list[Any] = []
        for text in self.args.method or ["none"]:
            if text.lstrip().startswith("{"):
                specs.append(json_object(text, "--method"))
                continue
            for name in parts(text, "--method"):
                if name == "all":
                    specs += method_names()
                elif name in method_names() or name in PRESETS:
                    specs.append(name)
                else:
                    known = ", ".join([*method_names(), *PRESETS])
                    raise PlanError(f"--method: unknown method {name[:40]!r} (known: {known}, all)")
        config = self.args.method_config
        if config is not None:
            spec = self._one(specs, "--method", "--method-config")
            if not isinstance(spec, str) or spec in PRESETS:
                raise PlanError("--method-config: needs --method NAME")
            parameters = json_object(text_or_file(config), "--method-config")
            if "method" in parameters:
                raise PlanError("--method-config: holds parameters only; the method is --method's")
            return [{"method": spec, **parameters}]
        return specs


def models_text() -> str:
    """The catalogue as a table."""
    rows = [[name, find_model(name).summary()] for name in catalogue()]
    return table(["model", "what keeps memory"], rows)
