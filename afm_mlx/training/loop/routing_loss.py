"""Losses that keep a mixture's experts in use, and figures of their load, for models of parallel tracks.

    balance = E * sum over experts of f_e P_e        of each track, layer and row; then the mean: 1 if uniform
    z       = mean of logsumexp(logits)^2

with f_e the share of the row's choices that fell on expert e, and P_e its mean probability, both without
padding, which is token 0.

Source: `tamm` 0.2.0, `tamm/layers/mixture_of_experts/loss.py`; arXiv 2101.03961 and 2202.08906.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.training.loop.losses import Loss, Metrics, loss_and_metrics

BALANCE_WEIGHT, Z_WEIGHT = 0.01, 0.001


@contextmanager
def observed_routing(model: nn.Module) -> Iterator[list[Any]]:
    """Collect the `Routing` of each sparse layer in the context, layer by layer."""
    routers = [layer.mlp for layer in model.layers if hasattr(layer.mlp, "observer")]
    found: list[Any] = []
    try:
        for router in routers:
            router.observer = found.append
        yield found
    finally:
        for router in routers:
            router.observer = None


def balance_loss(logits: mx.array, experts: mx.array, is_token: mx.array) -> mx.array:
    """Return the balance loss, (), of a layer.

    Args:
        logits: (T, B, S, E) float32 of all tracks.
        experts: (T, B, S, k) integers, the chosen experts.
        is_token: (B, S), false for padding. A row of padding does not count.
    """
    shares, tokens = expert_shares(experts, logits.shape[-1], is_token)
    probabilities = mx.softmax(logits, axis=-1, precise=True) * is_token[..., None]
    means = probabilities.sum(axis=2) / tokens
    rows = mx.maximum(is_token.any(axis=-1).sum(), 1)
    return (shares * means).sum() * logits.shape[-1] / (rows * logits.shape[0])


def expert_shares(experts: mx.array, count: int, is_token: mx.array) -> tuple[mx.array, mx.array]:
    """Return each expert's share of a row's choices, (T, B, count), and the rows' tokens, (B, 1), 1 or more."""
    chosen = (experts[..., None] == mx.arange(count)).sum(axis=-2) * is_token[..., None]
    tokens = mx.maximum(is_token.sum(axis=-1, keepdims=True), 1)
    return chosen.sum(axis=2) / (tokens * experts.shape[-1]), tokens


def z_loss(logits: mx.array, is_token: mx.array) -> mx.array:
    """Return the mean of the tokens' squared log-sum-exp, (), of logits (T, B, S, E)."""
    squares = mx.logsumexp(logits, axis=-1) ** 2 * is_token
    return squares.sum() / mx.maximum(is_token.sum() * logits.shape[0], 1)


class RoutingLoss:
    """A loss, plus the balance and z losses of all sparse layers in training.

    Metrics: `balance` and `router_z` as above; `load_entropy`, the entropy of the experts' load in a batch over
    the largest possible; and `load_max`, the load of the busiest expert over the mean; each a mean over
    layers and tracks.
    """

    def __init__(self, loss: Loss, balance: float = BALANCE_WEIGHT, z: float = Z_WEIGHT):
        self.loss = loss
        self.balance = balance
        self.z = z

    def __call__(self, model: nn.Module, batch: Any) -> tuple[mx.array, Metrics]:
        with observed_routing(model) as layers:
            value, metrics = loss_and_metrics(self.loss, model, batch)
        if not layers:
            return value, metrics
        is_token, weight = batch.inputs != 0, batch.weights.sum()
        balance = mx.stack([balance_loss(e.logits, e.experts, is_token) for e in layers]).mean()
        z = mx.stack([z_loss(each.logits, is_token) for each in layers]).mean()
        found = {"balance": balance, "router_z": z}
        found |= {f"load_{name}": each for name, each in _loads(layers, is_token).items()}
        if model.training:
            value = value + weight * (self.balance * balance + self.z * z)
        return value, metrics | {
            name: mx.stop_gradient(weight * each) for name, each in found.items()
        }


def _loads(layers: list[Any], is_token: mx.array) -> Metrics:
    entropies, busiest = [], []
    for each in layers:
        count = each.logits.shape[-1]
        shares, tokens = expert_shares(each.experts, count, is_token)
        load = (shares * tokens).sum(axis=1) / tokens.sum()  # (T, experts)
        logs = mx.log(mx.maximum(load, 1e-30))
        entropies.append(-(load * logs).sum(axis=-1).mean() / math.log(max(count, 2)))
        busiest.append(load.max(axis=-1).mean() * count)
    return {"entropy": mx.stack(entropies).mean(), "max": mx.stack(busiest).mean()}
