"""The simulated Ascend runtime: activation, settings, counters, faults, races, virtual clock.

:func:`activate` loads the simulated CANN libraries, after which the unmodified torch_npu runs on
the CPU. It must come before torch_npu is imported, and ``import torch`` imports torch_npu. Nothing
here imports torch. ``python -m npu_kv_ops.simulator script.py`` runs a program that knows nothing
of all this.

Every function may be called from any thread. docs/simulator.md says what is modelled.
"""

from npu_kv_ops.simulator._activation import activate, is_active, library
from npu_kv_ops.simulator._controls import (
    Stall,
    Stats,
    TaskRecord,
    clear_faults,
    clear_operator_costs,
    configure,
    drop_call,
    fail_call,
    fail_copy,
    now_ns,
    operator_cost,
    operators,
    overrides,
    reset_stats,
    settings,
    stall,
    stats,
    timeline,
)
from npu_kv_ops.simulator._races import (
    Race,
    RaceAccess,
    RaceError,
    check_races,
    checks_races,
    races,
)

__all__ = [
    "Race",
    "RaceAccess",
    "RaceError",
    "Stall",
    "Stats",
    "TaskRecord",
    "activate",
    "check_races",
    "checks_races",
    "clear_faults",
    "clear_operator_costs",
    "configure",
    "drop_call",
    "fail_call",
    "fail_copy",
    "is_active",
    "library",
    "now_ns",
    "operator_cost",
    "operators",
    "overrides",
    "races",
    "reset_stats",
    "settings",
    "stall",
    "stats",
    "timeline",
]
