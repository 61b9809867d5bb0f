"""The wrapper and TorchRec's DMPCollection side by side, on NCCL ranks."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardedTensor, ShardingPlan

from tests.benchmarks.peers.stock_1d import StockTrainer
from tests.benchmarks.two_d_train import TwoDTrainer, take
from tests.benchmarks.workload import Workload, clicks_spec, zipf_batches
from tests.harness.small_model import Case, form_groups, make_batch, pinned, rank_device, spec_of
from tests.integration.ranks.sharding_cases import DENSE_LR, Lookups, ShardingCase, make_rows
from trainer.checkpoint.state_dict import state_to_save
from trainer.coordination.client import Identity
from trainer.elastic.group_sync import CrossGroupProcessGroup, ReplicaRank
from trainer.elastic.peer_copy import DonorServer
from trainer.elastic.rendezvous import RendezvousStore
from trainer.layout.layout import WorkerSite
from trainer.parallel.mesh import MeshGroups
from trainer.parallel.model import TwoDParallel
from trainer.parallel.optimizer import Optimizers, fused_optimizer_params
from trainer.parallel.planner import make_plan
from trainer.parallel.row_store import CachedRows
from trainer.parallel.sharding import build_parallel_model, sharders
from trainer.parallel.sync import build_sync
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import PlannerSpec, SyncSpec
from trainer.spec.training import DensePrecision, OptimizerSpec
from trainer.training.pipeline import StepPipeline
from trainer.training.profiling import PhaseTimes, clock_of
from trainer.training.worker import prepare_process

SyncMode = Literal["full", "touched_rows"]
_SGD = {"sparse": {"name": "sgd", "lr": 0.1}, "dense": {"name": "sgd", "lr": 0.05}}


def world_sizes() -> tuple[int, int]:
    """(T, L) with M = 2: of all GPUs, or four ranks that share them where there are fewer."""
    world_size = max(4, torch.cuda.device_count() // 2 * 2)
    return world_size, world_size // 2


def compare(case: ShardingCase, mode: SyncMode) -> list[dict[str, float]]:
    """Train both models; after each step, and after its sync, how far apart they are.

    Each entry holds the largest absolute difference of any `weight` and any optimizer `state` on
    this rank.
    """
    spec = _with_sync(case.spec, mode)
    groups = form_groups(case)
    module, twin = Lookups(case), Lookups(case)
    for each in (module, twin):
        each.head.to(groups.device)  # the tables stay on the meta device until they are sharded
    ours, stock = _build_both(module, twin, spec, groups)
    optimizers = Optimizers(ours, spec)
    stock_dense = torch.optim.SGD([stock.module.head.weight], DENSE_LR)
    sync = build_sync(ours, spec)
    gaps = []
    for step in range(1, case.num_steps + 1):
        rows = [part.to(groups.device) for part in make_rows(case, step, groups.rank)]
        optimizers.begin_step(step, case.num_steps)
        stock_dense.zero_grad()
        ours(*rows).backward()
        stock(*rows).backward()
        optimizers.step()
        stock_dense.step()
        gaps.append(_gap(ours, stock))
        sync()
        stock.sync(include_optimizer_state=True)
        gaps.append(_gap(ours, stock))
    sync.close()
    return gaps


def compare_pipelined(case: Case, precision: DensePrecision) -> list[dict[str, float]]:
    """Train pipelined and in plain steps; after each step, how far apart both are."""
    spec, groups = spec_of(case), form_groups(case)
    training = spec.training.model_copy(update={"dense_precision": precision})
    spec = spec.model_copy(update={"training": training})
    prepare_process(WorkerConfig(spec, Path("unused"), "case-a0", 0))
    rank, is_cuda = groups.rank, groups.device.type == "cuda"
    batches = [make_batch(step, rank, case.batch_size) for step in range(1, case.num_steps + 1)]
    ours, plain = (build_parallel_model(spec, groups)[0] for _ in range(2))
    both = [(m, Optimizers(m, spec)) for m in (ours, plain)]
    with torch.no_grad():
        for theirs, mine in zip(*(_tensors(m.state_dict()) for m in (plain, ours)), strict=True):
            theirs.copy_(mine)
    pipeline = StepPipeline(ours, PhaseTimes(clock_of(groups.device)))
    ahead = pipeline.over((pinned(batch) if is_cuda else batch, None) for batch in batches)
    gaps = []
    for step, (batch, (on_device, _)) in enumerate(zip(batches, ahead, strict=True), start=1):
        for model, optimizers in both:
            optimizers.begin_step(step, case.num_steps)
            is_plain = model is plain
            found = model(batch.to(groups.device)) if is_plain else pipeline.forward(on_device)
            found[0].backward()
            optimizers.step()
        gaps.append(_gap(ours, plain))
    assert pipeline.is_ahead
    return gaps


def host_waits() -> dict[str, int]:
    """How often the host waits for the GPU in some pipelined steps, ours and stock ones at T = 1.

    As PyTorch counts: what it does itself, reading and copying.
    """
    workload = Workload(1, 1, num_tables=4, table_rows=1000, global_batch_size=64)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    device = rank_device()
    trainers = {
        "ours": TwoDTrainer(WorkerSite(0, "host", 0), clicks_spec(workload, "ours"), device=device),
        "stock": StockTrainer("pipelined", workload, device),
    }
    found = {}
    for name, trainer in trainers.items():
        steps = trainer.train(cycle(zipf_batches(workload, 0, 4)))
        take(steps, 5)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            take(steps, 10)
        torch.cuda.set_sync_debug_mode("default")
        found[name] = sum("synchroniz" in str(each.message) for each in told)
    return found


def compare_cached(case: Case, sync_spec: SyncSpec) -> list[dict[str, float]]:
    """Train with SGD on tables in HBM and on cached ones; after each step, how far apart both are.

    Each entry holds the largest difference of any row, and of anything that a checkpoint would
    hold, on this rank.
    """
    spec, groups = spec_of(case), form_groups(case)
    spec = spec.model_copy(update={"optimizer": OptimizerSpec.model_validate(_SGD)})
    runs = []
    for kernel in ("fused", "fused_uvm_caching"):
        planner = PlannerSpec(bandwidths="default", compute_kernel=kernel)
        parallelism = spec.parallelism.model_copy(update={"planner": planner, "sync": sync_spec})
        of_kind = spec.model_copy(update={"parallelism": parallelism})
        model, _ = build_parallel_model(of_kind, groups)
        optimizers = Optimizers(model, spec)
        runs.append((model, optimizers, build_sync(model, of_kind)))
    (flat, *_), (cached, *_) = runs
    with torch.no_grad():
        for theirs, mine in zip(*(_tensors(m.state_dict()) for m in (cached, flat)), strict=True):
            theirs.copy_(mine)
    assert all(isinstance(shard.rows[0], CachedRows) for shard in cached.table_shards())
    gaps = []
    for step in range(1, case.num_steps + 1):
        batch = make_batch(step, groups.rank, case.batch_size).to(groups.device)
        for model, optimizers, sync in runs:
            optimizers.begin_step(step, case.num_steps)
            model(batch)[0].backward()
            optimizers.step()
            sync.tick()
            if step % sync_spec.every_steps == 0:
                sync()
        gaps.append(_gap_of_rows(flat, cached))
    states = [state_to_save(model, optimizers.combined) for model, optimizers, _ in runs]
    gaps.append({"saved": _largest_gap(*states)})
    for *_, sync in runs:
        sync.close()
    return gaps


def _gap_of_rows(flat: TwoDParallel, cached: TwoDParallel) -> dict[str, float]:
    pairs = zip(flat.table_shards(), cached.table_shards(), strict=True)
    gaps = [(a.rows[0].read() - b.rows[0].read()).abs().max().item() for a, b in pairs]
    return {"rows": max(gaps, default=0.0)}


def _with_sync(spec: JobSpec, mode: SyncMode) -> JobSpec:
    parallelism = spec.parallelism.model_copy(update={"sync": SyncSpec(mode=mode)})
    return spec.model_copy(update={"parallelism": parallelism})


def _build_both(
    module: nn.Module, twin: nn.Module, spec: JobSpec, groups: MeshGroups
) -> tuple[TwoDParallel, DMPCollection]:
    """Both wrappers with the same plan, fused optimizer and starting weights."""
    fused_params = fused_optimizer_params(spec.optimizer.sparse, spec.moment_scale)
    table_sharders = sharders(spec)
    plan = make_plan(module, spec, groups, table_sharders)
    stock = _dmp_collection(twin, plan, fused_params, groups)
    ours = TwoDParallel(module, groups, plan, table_sharders, spec)
    with torch.no_grad():
        pairs = zip(_tensors(ours.state_dict()), _tensors(stock.state_dict()), strict=True)
        for mine, theirs in pairs:
            theirs.copy_(mine)
    return ours, stock


def exchange_between_groups(num_rounds: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What ranks that are groups of their own get of each other: by all-to-all, all-gather."""
    index, size = dist.get_rank(), dist.get_world_size()
    replica, device = ReplicaRank(1, index, size), rank_device()
    store, token = _get_default_store(), bytes(32)
    if index == 0:
        donor = DonorServer(Identity(0, 0, 0, 1, "127.0.0.1"), [], token)
        store.set("donor", donor.address)
    meeting = RendezvousStore(
        store.get("donor").decode(), 1, token, lambda: False, connect_s=60.0, wait_s=60.0
    )
    group = CrossGroupProcessGroup(replica, meeting, device, 60.0, lambda: False)
    found = []
    for round_ in range(num_rounds):
        parts = torch.arange(4.0 * size, device=device) + 100 * index + 1000 * round_
        swapped, gathered = torch.empty_like(parts), parts.clone()
        group.all_to_all(swapped, parts)
        group.all_gather(gathered)
        found.append((swapped.cpu(), gathered.cpu()))
    group.drop()
    dist.barrier()
    if index == 0:
        donor.close()
    return found


def _dmp_collection(
    module: nn.Module, plan: ShardingPlan, fused_params: dict[str, Any], groups: MeshGroups
) -> DMPCollection:
    return DMPCollection(
        module=module,
        device=groups.device,
        plan=copy.deepcopy(plan),  # it is placed on the group's ranks in place
        world_size=groups.layout.world_size,
        sharding_group_size=groups.layout.shard_group_size,
        global_pg=groups.global_group,
        sharders=[
            EmbeddingBagCollectionSharder(fused_params=fused_params),
            EmbeddingCollectionSharder(fused_params=fused_params),
        ],
        use_inter_host_allreduce=groups.layout.placement == "inter_host",
    )


def _largest_gap(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Minus infinity on a rank that holds none."""
    pairs = zip(_tensors(mine), _tensors(theirs), strict=True)
    return max(((a - b).abs().max().item() for a, b in pairs if a.numel()), default=-math.inf)


def _gap(ours: DistributedModelParallel, stock: DistributedModelParallel) -> dict[str, float]:
    return {
        "weight": _largest_gap(ours.state_dict(), stock.state_dict()),
        "state": _largest_gap(
            ours.fused_optimizer.state_dict()["state"], stock.fused_optimizer.state_dict()["state"]
        ),
    }


def _tensors(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Local tensors of a state dict, nested or not, in the order of its keys."""
    for key in sorted(state):
        value = state[key]
        if isinstance(value, Mapping):
            yield from _tensors(value)
        elif isinstance(value, DTensor):
            yield from value.to_local().local_shards()
        elif isinstance(value, ShardedTensor):
            yield from (shard.tensor for shard in value.local_shards())
        elif isinstance(value, torch.Tensor):
            yield value
