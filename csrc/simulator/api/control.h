// The simulator's own interface, for npu_kv_ops/simulator.py (through ctypes) and C++ tests. Every
// function is thread-safe and returns 0 or an aclError; the text is then in npu_sim_error().
#pragma once

#include <cstdint>

#include "abi/acl_rt_abi.h"

/// Message of this thread's last failing npu_sim_* call.
NPU_SIM_EXPORT const char* npu_sim_error();

/// Settings by name (engine/settings.h). Unknown name or value below the minimum: 100000.
NPU_SIM_EXPORT int npu_sim_set(const char* name, int64_t value);
NPU_SIM_EXPORT int npu_sim_get(const char* name, int64_t* value);
/// All names, separated by spaces.
NPU_SIM_EXPORT const char* npu_sim_setting_names();

/// Counters as a JSON object: {"calls": {name: n}, "copies": {"h2d": n, "d2h": n, "d2d": n,
/// "h2h": n}, "bytes": {same keys}, "operators": {type: n}, "operator_bytes": {type: n},
/// "batches": n, "calls_in_callback": n, "live": {"device_allocations": n, "device_bytes": n,
/// "pinned_allocations": n, "pinned_bytes": n, "registered_ranges": n, "streams": n, "events": n,
/// "graphs": n, "threads": n}}. The caller frees the string with npu_sim_free.
NPU_SIM_EXPORT char* npu_sim_stats();
NPU_SIM_EXPORT void npu_sim_free(char* text);
/// Counters to zero; "live" is not a counter and stays.
NPU_SIM_EXPORT void npu_sim_reset_stats();

/// Names the library of kernels that link torch; it is opened when torch_npu gets ready for its
/// first operator.
NPU_SIM_EXPORT void npu_sim_set_operator_library(const char* path);
/// The types of all operators that can be computed in this process as it is now, separated by ", ";
/// free with npu_sim_free.
NPU_SIM_EXPORT char* npu_sim_operator_types();
/// The device time of an operator type: a fixed part and one by the bytes it reads and writes. A
/// negative part is that of the settings operator_ns and operator_bytes_per_second. 100000: no
/// type, or 0 bytes a second.
NPU_SIM_EXPORT int npu_sim_set_operator_cost(const char* type, int64_t fixed_ns,
                                             int64_t bytes_per_second);
NPU_SIM_EXPORT void npu_sim_clear_operator_costs();

/// From now on calls number nth, nth+1, ... nth+times-1 of `function` fail with `code`.
NPU_SIM_EXPORT int npu_sim_fail_call(const char* function, int64_t nth, int code, int64_t times);
/// From now on calls number nth, nth+1, ... nth+times-1 of `function` answer success and do
/// nothing. Only for functions that give nothing back: events, waits, value words and synchronises.
NPU_SIM_EXPORT int npu_sim_drop_call(const char* function, int64_t nth, int64_t times);
/// The nth copy (item of a batch or single) executed from now on fails on the device.
NPU_SIM_EXPORT int npu_sim_fail_copy(int64_t nth, int code);
/// A stalled stream finishes its current task and starts no other until it is released.
NPU_SIM_EXPORT int npu_sim_stall(aclrtStream stream);
NPU_SIM_EXPORT int npu_sim_release(aclrtStream stream);
/// Forgets injected faults, releases stalled streams and heals contexts that stopped on a failure.
NPU_SIM_EXPORT void npu_sim_clear_faults();

/// Checks the accesses of work that is submitted from now on (1), or no more (0).
NPU_SIM_EXPORT void npu_sim_check_races(int on);
/// When the process ends, it prints the races that nobody has taken, and its exit code becomes 66.
NPU_SIM_EXPORT void npu_sim_report_races_at_exit();
/// How many races wait to be taken. A race that is found again from now on is a new one.
NPU_SIM_EXPORT int64_t npu_sim_mark_races();
/// The races found and not taken yet, but for the `first` ones, as a JSON array (free with
/// npu_sim_free): {"kind": "access" |
/// "batch" | "freed", "place": s, "address": n, "bytes": n, "count": n, "first": access, "second":
/// access}, an access being {"call": s, "kind": s, "operator": s, "writes": b, "stream": id or -1,
/// "handle": n, "task": n, "thread": n, "replay": s, "callers": s}.
NPU_SIM_EXPORT char* npu_sim_take_races(int64_t first);

/// Virtual time of the host, in ns since activation.
NPU_SIM_EXPORT int64_t npu_sim_now_ns();

/// A thread that does what another thread's callback asked for, and not only what comes next:
/// within a callback, its time; and that the calling thread, which has a time of its own from then
/// on, is not before that. Else its calls would be as late as the latest that the host has seen.
NPU_SIM_EXPORT int64_t npu_sim_callback_ns();
NPU_SIM_EXPORT void npu_sim_caused_at(int64_t ns);
/// While recording, every task run is kept: {"stream": id, "handle": n, "kind": s, "bytes": n,
/// "start_ns": n, "end_ns": n}. Stopping returns a JSON array (free with npu_sim_free).
NPU_SIM_EXPORT void npu_sim_timeline_start();
NPU_SIM_EXPORT char* npu_sim_timeline_stop();
