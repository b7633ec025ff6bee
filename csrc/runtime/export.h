// What other libraries of the package may call: everything else stays hidden.
#pragma once

#define NPU_KV_API __attribute__((visibility("default")))
