"""The fault injector is silent unless armed."""

from __future__ import annotations

import torch

from trainer.fault_injection import FAULTS, PHASES, VARIABLE, Fault, arm, inject, poison


def test_nothing_befalls_a_rank_for_which_no_faults_are_armed() -> None:
    faults = [Fault(kind="raise", phase=phase, group=1, rank=0, step=5) for phase in PHASES]
    faults.append(faults[0].model_copy(update={"kind": "nan"}))
    for group, rank, incarnation in ((0, 0, 0), (1, 1, 0), (1, 0, 1)):
        arm(group, rank, incarnation, {VARIABLE: FAULTS.dump_json(faults).decode()})
        for phase in PHASES:
            inject(phase, 5)
        loss = torch.tensor(2.0)
        poison(loss, 5)
        assert not loss.isnan()
