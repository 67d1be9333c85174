"""A learning rate for each weight matrix, from how heavy the tail of its spectrum is.

At step 1 and every `interval` steps of the first part of a training, alpha is fitted to each matrix and mapped to a
ratio; in `ramp` steps the ratios move there. At every step ``lr_l = ratio_l * (what the scheduler gives)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from layerwise_lr.config import LLRConfig
from layerwise_lr.errors import WarnOnce
from layerwise_lr.layers import Gather, Matrix, matrices
from layerwise_lr.measurement import LayerReport
from layerwise_lr.ramp import Ramp
from layerwise_lr.rates import BaseValue, Group, call_before_step, preview, unwrapped
from layerwise_lr.refresh import Reader, Reports, ranks
from layerwise_lr.targets import embedding_ratio, fitted_ratios

Remap = Callable[[dict[str, float]], Mapping[str, float]]
_VERSION = 1
_AGAIN = "measure again"


class LayerwiseLR:
    """Multiplies the rate of each matrix's group after the scheduler.

    ::

        optimizer = torch.optim.AdamW(param_groups(model, lr=6e-4, weight_decay=0.1))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3200)
        llr = LayerwiseLR(optimizer, model, scheduler, s2=3.0, total_steps=3200)
        for batch in batches:
            ...
            optimizer.step(); scheduler.step(); llr.step()

    Args:
        optimizer: with the weights of different matrices in different groups: see `layerwise_lr.groups.param_groups`.
        model: whose matrices are measured; compiled, wrapped and LoRA models too.
        scheduler: the scheduler of this optimizer, a sequence of them, or None for a constant rate.
        config: settings; or give them as keywords, see `layerwise_lr.config.LLRConfig`.
        remap: last word on the targets of a refresh: called with all ratios, returns those that apply.
        gather: returns the whole of a parameter of which this rank holds a part (ZeRO-3); `DTensor` needs none.
        process_group: ranks that train together, for sharing the measurements.
        settings: fields of LLRConfig.

    Attributes:
        ratios: present ratio of each matrix.
        alphas: exponents of the last refresh; matrices that were not fitted are not in it.
        reports: what was measured at the last refresh.
        history: one entry a refresh: step, alphas, target ratios, and the reason for each matrix that was not fitted.
        step_count: steps taken.

    Raises:
        ValueError: a setting out of range; a group with several matrices; a scheduler of another optimizer.
        TypeError: an unknown setting.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        scheduler: Any | Sequence[Any] | None = None,
        *,
        config: LLRConfig | None = None,
        remap: Remap | None = None,
        gather: Gather | None = None,
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        self.config = _config(config, settings)
        self.optimizer, self.remap = optimizer, remap
        self.schedulers = _schedulers(optimizer, scheduler)
        self.layers = matrices(model, lora=self.config.lora, gather=gather)
        self.step_count = 0
        self.reports: Reports = {}
        self.history: list[dict[str, Any]] = []
        self._ramps = {layer.name: Ramp(1.0) for layer in self.layers}
        self._values: dict[str, dict[str, BaseValue]] = {}  # of each governed group, by its first parameter's name
        self._warn = WarnOnce()
        self._reader = Reader(self.config.measure, self.config.background, process_group)
        self._deterministic = self.config.deterministic or ranks(process_group)[1] > 1
        self._collected: Reports | None = None
        self._bound: list[tuple[Group, str, Ramp]] = []
        self._seen: list[tuple[Group, int]] = []  # the groups as they were bound
        self._bind()
        for each in self.schedulers:
            call_before_step(each, self._restore)

    # -- state that is read ----------------------------------------------------------------------------------------

    @property
    def ratios(self) -> dict[str, float]:
        """Present ratio of each matrix."""
        return {name: ramp.ratio(self.step_count) for name, ramp in self._ramps.items()}

    @property
    def alphas(self) -> dict[str, float]:
        """Exponents of the last refresh."""
        return {name: report.alpha for name, report in self.reports.items() if report.fitted}

    @property
    def lrs(self) -> dict[str, float]:
        """Present rate of each governed group, by parameter name."""
        return {key: float(group["lr"]) for group, key, _ in self._bound}

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take one step: call it where the scheduler is stepped, after it. A call is a step, so with gradient
        accumulation or skipped optimizer steps call it as often as the scheduler.
        """
        self._restore()
        self.step_count += 1
        if self._reader.pending and (self._deterministic or self._reader.ready):
            self._apply(self._reader.collect())
        elif self._collected is not None:
            self._apply(self._collected)
            self._collected = None
        if self.config.refreshes_at(self.step_count):
            self._refresh()
        self._write()

    def close(self) -> None:
        """End the background thread."""
        self._reader.close()

    def _refresh(self) -> None:
        layers = self._fitted_layers()
        if not self.config.background:
            self._apply(self._reader.read(layers))
        elif not self._reader.pending:
            self._reader.start(layers)

    def _fitted_layers(self) -> list[Matrix]:
        fitted = []
        for layer in self.layers:
            if layer.role != "matrix" or not any(p.requires_grad for p in layer.parameters.values()):
                continue
            if layer.skip:
                self._warn(layer.name, f"{layer.name} keeps the base rate: {layer.skip}")
            else:
                fitted.append(layer)
        return fitted

    def _apply(self, reports: Reports) -> None:
        """Begin the ramps to what the reports say."""
        self.reports = reports
        targets = self._targets(reports)
        rates = self._rates_ahead() if self.config.ramp_in == "rate" else {}
        for name, target in targets.items():
            self._ramps[name].begin(self.step_count, self.config.ramp, target, rates.get(name))
        alphas = {name: report.alpha for name, report in reports.items() if report.fitted}
        notes = {name: report.note for name, report in reports.items() if not report.fitted}
        self.history.append({"step": self.step_count, "alphas": alphas, "targets": targets, "not fitted": notes})

    def _targets(self, reports: Reports) -> dict[str, float]:
        fitted = fitted_ratios(reports, self.config)
        targets = dict(fitted)
        for name, report in reports.items():
            if report.fitted:
                continue
            finite = not report.note.startswith("NaN")
            targets[name] = 1.0 if finite else self._ramps[name].ratio(self.step_count)
            if "min_dim" not in report.note:
                self._warn(name, f"{name} {'gets the base' if finite else 'keeps its'} rate: {report.note}")
        for layer in self.layers:
            if layer.role != "matrix":
                targets[layer.name] = embedding_ratio(fitted, self.config)
        if self.remap is not None:
            targets = {**targets, **self.remap(dict(targets))}
        unknown = sorted(targets.keys() - self._ramps.keys())
        bad = {name: ratio for name, ratio in targets.items() if not ratio > 0}
        if unknown or bad:
            raise ValueError(
                f"remap must return positive ratios of known matrices; unknown {unknown}, not positive {bad}"
            )
        return targets

    # -- groups ----------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Find the group of each matrix; groups may have been added, replaced or reordered since the last step."""
        groups = self.optimizer.param_groups
        if len(groups) == len(self._seen) and all(
            group is known and len(group["params"]) == count
            for group, (known, count) in zip(groups, self._seen, strict=True)
        ):
            return
        owner = {
            id(parameter): (key, layer.name) for layer in self.layers for key, parameter in layer.parameters.items()
        }
        bound = []
        for index, group in enumerate(groups):
            keys = {owner[id(p)] for p in group["params"] if id(p) in owner}
            names = sorted({name for _, name in keys})
            if len(names) > 1 or (names and len(keys) < len(group["params"])):
                raise ValueError(
                    f"parameter group {index} mixes {len(group['params'])} parameters, among them the matrices "
                    f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: one group has one rate. Build the "
                    "optimizer from layerwise_lr.param_groups(model, lr=...)"
                )
            if names:
                key = min(key for key, _ in keys)
                if key not in self._values:
                    self._values[key] = {name: BaseValue(group, name) for name in self._scaled(group)}
                bound.append((group, key, self._ramps[names[0]]))
        self._bound, self._seen = bound, [(group, len(group["params"])) for group in groups]

    def _scaled(self, group: Group) -> list[str]:
        return ["lr", "weight_decay"] if self.config.decay == "constant" and "weight_decay" in group else ["lr"]

    def _restore(self) -> None:
        """Put the base values back into the groups."""
        self._bind()
        for group, key, _ in self._bound:
            for value in self._values[key].values():
                value.restore(group)
                value.observe(group)

    def _write(self) -> None:
        for group, key, ramp in self._bound:
            values = self._values[key]
            ratio = ramp.ratio(self.step_count, values["lr"].base)
            group["llr_ratio"] = ratio
            values["lr"].write(group, ratio)
            if "weight_decay" in values:
                values["weight_decay"].write(group, 1 / ratio)

    def _rates_ahead(self) -> dict[str, tuple[float, float]]:
        """Base rate now and at the ramp's end, of each matrix."""
        ahead = preview(self.optimizer, self.schedulers, self.config.ramp)
        order = {id(group): index for index, group in enumerate(self.optimizer.param_groups)}
        names = {id(ramp): name for name, ramp in self._ramps.items()}
        return {
            names[id(ramp)]: (self._values[key]["lr"].base, ahead[order[id(group)]]) for group, key, ramp in self._bound
        }

    # -- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, plain values only; one rank may call it alone.

        Waits for a measurement under way. With several ranks, which share it, the state says to measure again: the
        weights it is saved with are those that were being measured.
        """
        pending: Any = None
        if self._reader.pending and ranks(self._reader.process_group)[1] > 1:
            pending = _AGAIN
        elif self._reader.pending:
            self._collected = self._reader.collect()
        if self._collected is not None:
            pending = [report.to_json() for report in self._collected.values()]
        return {
            "version": _VERSION,
            "step": self.step_count,
            "config": self.config.to_json(),
            "ramps": {name: ramp.to_json() for name, ramp in self._ramps.items()},
            "base": {key: {name: v.base for name, v in values.items()} for key, values in self._values.items()},
            "reports": [report.to_json() for report in self.reports.values()],
            "history": self.history,
            "pending": pending,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the rates are written at once. Load the optimizer's and scheduler's
        states too, in any order, and the model's before.

        Raises:
            ValueError: another version, other settings, or a model with other matrices.
        """
        _check_state(state, self.config, set(self._ramps))
        self.step_count = int(state["step"])
        for name, ramp in state["ramps"].items():
            self._ramps[name].load(ramp)
        self.reports = _reports(state["reports"])
        self.history = [dict(entry) for entry in state["history"]]
        self._collected = _reports(state["pending"]) if isinstance(state["pending"], list) else None
        if state["pending"] == _AGAIN:
            self._reader.start(self._fitted_layers())
        self._bind()
        for group, key, ramp in self._bound:
            ratio = ramp.ratio(self.step_count, state["base"].get(key, {}).get("lr", self._values[key]["lr"].base))
            group["llr_ratio"] = ratio
            for name, base in state["base"].get(key, {}).items():
                if name in self._values[key]:
                    self._values[key][name].load(group, float(base), ratio if name == "lr" else 1 / ratio)


def _config(config: LLRConfig | None, settings: dict[str, Any]) -> LLRConfig:
    if config is not None and settings:
        raise TypeError(f"give config or keywords, not both; got config and {', '.join(settings)}")
    known = [name for name, f in LLRConfig.__dataclass_fields__.items() if f.init]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise TypeError(f"unknown setting(s) {', '.join(unknown)}; allowed: {', '.join(known)}")
    return config or LLRConfig(**settings)


def _schedulers(optimizer: Optimizer, scheduler: Any) -> list[Any]:
    found = list(scheduler) if isinstance(scheduler, list | tuple) else [] if scheduler is None else [scheduler]
    if not found and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError("this optimizer has a learning rate scheduler: pass it as scheduler=")
    groups = len(optimizer.param_groups)
    for each in found:
        if unwrapped(getattr(each, "optimizer", optimizer)) is not optimizer:
            raise ValueError(f"{type(each).__name__} belongs to another optimizer than the one given")
        rates = getattr(each, "base_lrs", None)
        if rates is not None and len(rates) != groups:
            raise ValueError(
                f"{type(each).__name__} has {len(rates)} base rates for {groups} parameter groups: make the scheduler "
                "after the groups are final"
            )
    return found


def _reports(rows: Sequence[Mapping[str, Any]]) -> Reports:
    return {row["name"]: LayerReport(**{**row, "shape": tuple(row["shape"])}) for row in rows}


def _check_state(state: Mapping[str, Any], config: LLRConfig, names: set[str]) -> None:
    if state.get("version") != _VERSION:
        raise ValueError(f"this is a state of version {state.get('version')!r}; this package reads version {_VERSION}")
    other = sorted(set(state["ramps"]) ^ names)
    if other:
        raise ValueError(f"the state is of a model with other matrices; they differ in {', '.join(other[:5])}")
    mine = config.to_json()
    differ = {key: (value, mine.get(key)) for key, value in state["config"].items() if mine.get(key) != value}
    if differ:
        told = "; ".join(f"{key}: saved {saved!r}, now {now!r}" for key, (saved, now) in differ.items())
        raise ValueError(f"the state was saved with other settings ({told}); give the saved ones")
